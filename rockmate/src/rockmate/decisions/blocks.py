"""The blocks of a root: submodules that it calls in a sample's step, and the options of each call.

A block is recorded at its call, and gets the options of a planned module. If a block itself has
value-dependent control flow, the submodules that it calls become blocks instead. If these could
save little of its memory, the block remains, and its calls keep everything or nothing. Calls of
blocks with tensors of many sizes (experts that get some of the tokens) also keep everything or
nothing, because later sizes differ.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.elements import flatten, is_inside, own_copy
from rkgb.errors import without_advice
from rkgb.module_state import BufferContents
from rkgb.torch_api import placed_parameters
from rockmate.arguments import Call
from rockmate.blockwise.kinds import Kind, ways_to_run
from rockmate.calls.plan_store import Family, Key
from rockmate.calls.planned_module import PlannedModule
from rockmate.calls.plans_of_module import NotPlannedError
from rockmate.comparison.fingerprint import Fingerprints
from rockmate.decisions.dressing import Dressing, undressed
from rockmate.decisions.recomputed import tensors_read
from rockmate.errors import InfeasibleBudgetError, RockmateError
from rockmate.guards.module_watch import view_of
from rockmate.networks import Planned
from rockmate.networks.network import Network
from rockmate.options.options import BlockOption
from rockmate.runtime.plain import plain
from rockmate.settings import Terms

KEEP, AGAIN = "keep", "again"  # a plain call; a call that saves nothing and is recomputed
EVERYTHING = 1 << 62  # a budget that keeps everything
_DIGITS = re.compile(r"\d+")
_MOST_KINDS = 16  # of calls that one block plans for; more seem to be without end
_MUCH = 0.5  # share of a block's memory that its parts must be able to save to replace it
_TORCH = "torch.nn.modules."


class WrittenOutsideError(Exception):
    """The root's forward writes to a tensor after a block has read it."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, name)
        self.path, self.name = path, name
        self.group = group_of(path)

    def __str__(self) -> str:
        return (
            f"'{self.path}.{self.name}' is written in the forward of the root after '{self.path}' "
            "has read it, so that it and layers in its place keep everything: a recomputation "
            "would read it as it is then. Write it before the call, or after the step"
        )


class RecordedBlock(PlannedModule):
    """Records calls of a block, and makes forwards that run them as planned."""

    is_part = True

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Key, Planned]:
        """Return the key of a call, and its recording, which keeps everything."""
        self.prepare([(args, kwargs)])
        key, family = next(reversed(self.plans.families.items()))
        return key, family.variants[0]

    def as_planned(self, key: Key, planned: Planned, most_kept_bytes: int) -> PlannedBlock:
        """Return a forward of the same block that runs calls of one key as planned."""
        settings = replace(
            self.settings, budget=planned.budget_bytes, most_kept_bytes=most_kept_bytes
        )
        forward = PlannedBlock(self.model, settings)
        forward.watch = self.watch
        row = self.plans.families[key].row
        forward.plans.put(key, Family([planned], row))
        forward._locate(planned)
        forward.first = planned
        return forward


class PlannedBlock(PlannedModule):
    """Runs one option of a block.

    A call of another kind (another number, an attribute that has changed) is planned when it comes,
    within the bytes of the option at its peak and between its passes.
    """

    is_part = True

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        super().__init__(model, settings)
        self.refused: dict[Key, str] = {}  # calls that no plan fits

    def _plan(self, key: Key, call: Call) -> Family:
        if key in self.refused:
            raise NotPlannedError(self.refused[key])
        self.is_sealed = len(self.plans.families) + len(self.refused) >= _MOST_KINDS
        try:
            with _in_a_step():
                return super()._plan(key, call)
        except NotPlannedError as error:
            if not self.is_sealed:
                self.refused[key] = str(error)
            raise

    def _add_way(self, family: Family, call: Call) -> Planned:
        with _in_a_step():
            return super()._add_way(family, call)


@contextlib.contextmanager
def _in_a_step() -> Iterator[None]:
    """Plan for a call of a block as if outside of its root.

    Raises:
        NotPlannedError: the call cannot be planned within the bytes of the block.
    """
    try:
        with undressed():
            yield
    except InfeasibleBudgetError as error:
        raise NotPlannedError(
            f"it needs {error.minimum_bytes} bytes, and may take {error.asked_bytes} in this step"
        ) from error
    except (RockmateError, RkgbError) as error:
        raise NotPlannedError(without_advice(str(error))) from error


def group_of(path: str) -> str:
    """Return a path that is equal for repeated layers."""
    return _DIGITS.sub("#", path)


HowToRun = PlannedBlock | str  # or `KEEP`, or `AGAIN`


@dataclass(eq=False)
class RootBlock:
    """One submodule, its recordings, and its observed writes."""

    path: str
    module: nn.Module
    view: nn.Module  # the same state, never redirected
    base: RecordedBlock
    writes_buffers: bool = False
    can_run_again: bool = True  # it changes nothing but buffers and attributes
    planned: dict[tuple[Key, int], PlannedBlock] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """Equal for repeated layers."""
        return group_of(self.path)


@dataclass(eq=False)
class SeenCall:
    """One call of a block in the sample's step, with its options."""

    block: RootBlock
    shapes: tuple[Any, ...]
    key: Key
    kind: Kind
    runs_whole: bool  # it keeps everything or nothing

    @property
    def options(self) -> tuple[BlockOption, ...]:
        """The options, the fastest first."""
        if not self.runs_whole:
            return self.kind.options
        options = self.kind.options
        most = max(options, key=lambda o: o.saved_bytes)
        least = min(options, key=lambda o: o.saved_bytes)
        time_ms = sum(node.fwd_time_ms for node in self.kind.recorded.problem.nodes)
        if not self.block.can_run_again or most.saved_bytes == least.saved_bytes:
            return (most,)
        return most, replace(
            most, saved_bytes=least.saved_bytes, overhead_ms=max(time_ms, most.overhead_ms)
        )

    def run(self, number: int) -> HowToRun:
        """Return what runs one of the options."""
        if self.runs_whole:
            return (KEEP, AGAIN)[number]
        known = self.block.planned.get((self.key, number))
        if known is None:
            planned = self.kind.planned(number)
            kept_bytes = self.options[number].saved_bytes
            known = self.block.base.as_planned(self.key, planned, kept_bytes)
            self.block.planned[self.key, number] = known
        return known

    @property
    def least(self) -> int:
        """The option that keeps least."""
        rows = self.options
        return min(range(len(rows)), key=lambda n: (rows[n].saved_bytes, rows[n].bwd_peak_bytes))

    def reads(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that it reads, with their names."""
        view, planned = self.block.view, self.kind.recorded
        own: dict[str, Tensor] = dict(placed_parameters(view, remove_duplicate=False))
        own.update(view.named_buffers(remove_duplicate=False))
        basic = planned.network.basic
        names = {**basic.parameters, **basic.buffers}
        read = {names.get(name) for name in planned.executor.expected.program.externals}
        whole = bool(planned.network.opaque)  # an opaque call may read any of them
        yield from ((name, tensor) for name, tensor in own.items() if whole or name in read)

    @property
    def savable_bytes(self) -> int:
        """The largest difference between kept bytes of two options."""
        kept = [option.saved_bytes for option in self.options]
        return max(kept) - min(kept)


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
        self.read: dict[
            str, list[tuple[str, Tensor, Any]]
        ] = {}  # after the last call of each block
        self.settings = replace(
            settings, budget=EVERYTHING, self_test=False, share=False, cache=False, plan=None,
            reserve=0, compile=False, split=False, offload=None, host_budget=None,
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
            return result
        self.calls.append(seen)
        with self._observed(seen, args, kwargs):
            return self._run(path, seen.run(seen.least), args, kwargs)

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
        leaves = (*flatten((args, dict(kwargs)))[0], *(t for _, t in tensors_read(block.view)))
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
        leaves = flatten((args, dict(kwargs)))[0]
        shapes = tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor))
        whole = not self.plans or "" in planned.network.opaque
        seen = SeenCall(block, shapes, key, kind, whole)
        if not seen.savable_bytes:
            self.plain.add(path)
            return None
        self.blocks[path] = block
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
