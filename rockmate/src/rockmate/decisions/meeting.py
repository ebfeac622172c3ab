"""One step in which the submodules that a root calls are recorded, and become its blocks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.elements import flatten, group_of, is_inside, own_copy, target_of
from rkgb.module_state import BufferContents, ModuleState
from rkgb.outside import Readable
from rockmate.arguments import Call
from rockmate.blockwise.kinds import Kind, ways_to_run
from rockmate.comparison.fingerprint import Fingerprints
from rockmate.decisions.blocks import (
    EVERYTHING,
    KEEP,
    HowToRun,
    RecordedBlock,
    RootBlock,
    SeenCall,
    WrittenOutsideError,
    shapes_of,
)
from rockmate.decisions.dressing import Dressing, undressed
from rockmate.errors import RockmateError
from rockmate.guards.module_watch import view_of
from rockmate.networks import Planned
from rockmate.networks.network import Network
from rockmate.runtime.plain import plain
from rockmate.settings import Terms

_MUCH = 0.5  # share of a block's memory that its parts must be able to save to replace it
_TORCH = "torch.nn.modules."


def place_of(settings: Terms) -> str | None:
    """Return where blocks may move what they save, or None.

    A limit of what is there cannot be kept: how often blocks are called is decided in each step.
    """
    return settings.offload if settings.host_budget is None else None


class Meeting:
    """Replaces the forward of all submodules for one step: records blocks and their options.

    It runs each block with the option that keeps least. Calls of blocks in `written` groups stay
    plain. The root writes to their parameters after the call, so a recomputation would not find the
    values that their forward has read.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Terms,
        whole: Iterable[str],
        *,
        plans: bool,
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.plans, self.written = model, plans, written
        self.fingerprints = Fingerprints()
        # After the last call of each block.
        self.read: dict[str, list[tuple[str, Tensor, Any]]] = {}
        self.settings = replace(
            settings, budget=EVERYTHING, self_test=False, share=False, cache=False, plan=None,
            reserve=0, compile=False, split=False, offload=place_of(settings), host_budget=None,
            progress=False, opaque=(), max_plans=1 << 10,
        )  # fmt: skip
        self.modules = {path: m for path, m in model.named_modules() if path}
        self.views = {path: view_of(module) for path, module in self.modules.items()}
        self.dressing = Dressing(self.modules)
        self.open = {p for p in self.modules if any(is_inside(w, p) for w in whole if w)}
        self.plain = {p for p in self.modules if group_of(p) in written}  # no options
        self.blocks: dict[str, RootBlock] = {}
        self.calls: list[SeenCall] = []
        self.samples: dict[str, Call] = {}  # by group
        self.kinds: dict[str, list[Kind]] = {}  # by group
        self.ends: list[SeenCall] = []  # of which the root returns a result as it is
        self._made: list[tuple[SeenCall, list[weakref.ref[Tensor]]]] = []
        self._inside = False

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward of the root.

        Raises:
            WrittenOutsideError: it has written to a tensor after a block has read it.
        """
        with self.dressing.led_to(self):
            result = model.forward(*args, **kwargs)
        for path in {call.block.path: None for call in self.calls}:
            if name := self._changed(path):
                raise WrittenOutsideError(path, name)
        given = [t for t in flatten(result)[0] if isinstance(t, Tensor)]
        self.ends = [
            seen for seen, made in self._made if any(ref() is t for ref in made for t in given)
        ]
        return result

    def _note(self, seen: SeenCall, result: Any) -> Any:
        """Note what a call returns, and return it."""
        tensors = (t for t in flatten(result)[0] if isinstance(t, Tensor))
        self._made.append((seen, [*map(weakref.ref, tensors)]))
        return result

    def _changed(self, path: str) -> str:
        """Return a tensor that a block reads and that has changed since its last call, or ''."""
        rows = self.read.get(path, ())
        return next((n for n, t, before in rows if self.fingerprints.of(t) != before), "")

    def __call__(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        view = self.views[path]
        may = not self._inside and path not in self.open and torch.is_grad_enabled()
        if not may or not _is_worth_it(view, args, kwargs):
            return view.forward(*args, **kwargs)
        seen = None if path in self.plain else self._seen(path, args, kwargs)
        if seen is None:
            is_leaf = path in self.plain
            return self._run(path, KEEP, args, kwargs) if is_leaf else view.forward(*args, **kwargs)
        first = len(self.calls)
        is_new = not any(call.block is seen.block for call in self.calls)
        if self._decides(seen) and is_new and next(view.children(), None) is not None:
            with self._observed(seen, args, kwargs):
                result = view.forward(*args, **kwargs)
            inner = sum(call.savable_bytes for call in self.calls[first:])
            if inner >= _MUCH * seen.savable_bytes:
                self.open.add(path)
                return result
            del self.calls[first:]
            self.calls.append(seen)
            return self._note(seen, result)
        self.calls.append(seen)
        with self._observed(seen, args, kwargs):
            return self._note(seen, self._run(path, seen.run(seen.least), args, kwargs))

    def _decides(self, seen: SeenCall) -> bool:
        """Return whether a block's recording has an opaque call of a module with submodules."""
        model = seen.block.view
        opaque = seen.kind.recorded.network.opaque
        return any(next(model.get_submodule(p).children(), None) is not None for p in opaque)

    def _run(
        self, path: str, run: HowToRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        self._inside = True
        try:
            if isinstance(run, str):
                return self.views[path].forward(*args, **kwargs)
            return run(args, kwargs)
        finally:
            self._inside = False

    @contextlib.contextmanager
    def _observed(
        self, seen: SeenCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Note what a call of a block writes, and what others have written since its last call."""
        block = seen.block
        if name := self._changed(block.path):
            raise WrittenOutsideError(block.path, name)
        buffers = {id(b) for b in block.view.buffers()}
        own = (tensor for _, tensor in ModuleState(block.view).tensors())
        leaves = (*flatten((args, dict(kwargs)))[0], *own)
        read = [t for t in leaves if isinstance(t, Tensor) and not t.is_inference()]
        versions = [(t, t._version) for t in read if id(t) not in buffers]
        contents = BufferContents(block.view)
        yield
        block.writes_buffers |= contents.changed()
        block.can_run_again &= all(tensor._version == version for tensor, version in versions)
        self.read[block.path] = [(n, t, self.fingerprints.of(t)) for n, t in seen.reads()]

    # ------------------------------------------------------------------ recordings

    def _seen(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SeenCall | None:
        """Return a call with its options, or None if it has none or cannot be recorded."""
        block = self.blocks.get(path)
        if block is None:
            base = RecordedBlock(self.views[path], self.settings)
            block = RootBlock(path, self.modules[path], self.views[path], base)
        kinds = self.kinds.setdefault(block.group, [])
        block.base.known = tuple(kind.recorded for kind in kinds)
        try:
            with undressed(), plain():
                key, planned = block.base.recorded(args, kwargs)
                kind = self._kind(planned, kinds)
        except (RockmateError, RkgbError):
            self.open.add(path)
            return None
        shapes = shapes_of(flatten((args, dict(kwargs)))[0])
        whole = not self.plans or "" in planned.network.opaque
        seen = SeenCall(block, shapes, key, kind, whole)
        if not seen.savable_bytes:
            self.plain.add(path)
            return None
        self.blocks[path] = block
        basic = planned.network.basic
        calls = [call for op in basic.ops if (call := target_of(op).whole) is not None]
        block.can_run_again &= not any(call.runs_once for call in calls)
        inside = (call.reads for call in calls if call.reads is not None)
        block.read_by[key] = [Readable(basic.sources), *inside]
        if block.group not in self.samples:
            self.samples[block.group] = _detached(args), _detached(kwargs)
        return seen

    def _kind(self, planned: Planned, kinds: list[Kind]) -> Kind:
        """Return the options of a recording, or of an equal earlier one."""
        networks: dict[Hashable, Network] = {None: planned.network}
        for kind in kinds:
            if kind.recorded.problem is planned.problem:
                return Kind(planned, kind.options, networks, 0)
        kind = Kind(planned, ways_to_run(networks, self.settings.backend), networks, 0)
        kinds.append(kind)
        return kind

    # ------------------------------------------------------------------ afterwards

    def settle(self) -> None:
        """Reduce calls of blocks that come with many sizes to: keep everything, or nothing."""
        shapes: dict[tuple[str, int], set[Any]] = {}
        for call in self.calls:
            shapes.setdefault((call.block.group, len(call.shapes)), set()).add(call.shapes)
        for call in self.calls:
            if len(shapes[call.block.group, len(call.shapes)]) > 1:
                call.runs_whole = True
        used = {call.block.path for call in self.calls}
        self.blocks = {path: block for path, block in self.blocks.items() if path in used}

    def unseen(self) -> list[SeenCall]:
        """Return calls of repeated layers that did not run in this step."""
        found = []
        groups = {block.group: block for block in self.blocks.values()}
        whole = {call.block.group for call in self.calls if call.runs_whole}
        for path, module in self.modules.items():
            alike = groups.get(group_of(path))
            is_alike = alike is not None and type(module) is type(alike.view)
            if is_alike and path not in self.blocks and alike is not None:
                seen = self._seen(path, *self.samples[alike.group])
                if seen is not None:
                    seen.runs_whole |= alike.group in whole
                    seen.block.writes_buffers = alike.writes_buffers
                    seen.block.can_run_again = alike.can_run_again
                    found.append(seen)
        return found


def _is_worth_it(view: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call has a backward and more than one operation."""
    kind = type(view).__module__
    is_one = kind.startswith(_TORCH) and not kind.endswith(".rnn")
    if is_one and next(view.children(), None) is None:
        return False
    leaves = (*flatten((args, dict(kwargs)))[0], *view.parameters())
    return any(isinstance(t, Tensor) and t.requires_grad for t in leaves)


def _detached(call: Any) -> Any:
    leaves, structure = flatten(call)
    return structure.unflatten([*map(own_copy, leaves)])
