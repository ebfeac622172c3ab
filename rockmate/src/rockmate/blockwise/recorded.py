"""The blocks of a model in steps that are run for planning: recorded, and tested.

An error in a block is kept until the step is over, and all processes then raise it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.engine import Sample
from rkgb.torch_api import is_in_checkpoint
from rockmate.arguments import Call
from rockmate.blockwise.kinds import (
    Kind,
    LockstepModule,
    options_for,
    recorded_block,
    refuse_shards_inside,
    ways_to_run,
)
from rockmate.blockwise.rehearsal import run_step
from rockmate.blockwise.saved_blocks import mismatch, moves_any, ways_for
from rockmate.blockwise.team import Team
from rockmate.calls.planned_module import PlannedModule
from rockmate.comparison.deterministic import deterministic_algorithms
from rockmate.errors import InvalidPlanError, UnsupportedModuleError
from rockmate.files.plan_file import SavedBlocks
from rockmate.guards.input_signature import in_order, key_of
from rockmate.guards.module_watch import without_hooks
from rockmate.guards.sharded import (
    device_of_parameters,
    is_sharded,
    local_part,
    own_class,
    settled_call,
    whole_parts,
)
from rockmate.networks.network import Network
from rockmate.networks.offload import offload_of
from rockmate.networks.self_test import eager_step, self_test
from rockmate.requests.identity import facts_of_calls
from rockmate.runtime.plain import is_plain, plain
from rockmate.settings import Terms

_log = logging.getLogger("rockmate")
_EVERYTHING = 1 << 62  # a budget that keeps everything, for recording and measuring a block


class _Intercepted(PlannedModule):
    """Replaces the forward of a block in a step that is run for planning: it calls `call`."""

    def __init__(self, path: str, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__(model, Terms(_EVERYTHING))
        self.path, self.call = path, call

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.call(self, *settled_call(args, kwargs))


class RecordedBlocks:
    """The blocks of one model, as one call meets them, and the options with which they run."""

    def __init__(
        self,
        model: nn.Module,
        views: Mapping[str, nn.Module],
        settings: Terms,
        *,
        team: Team,
        in_flight: int = 1,
        saved: SavedBlocks | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.note = note  # reports progress
        self.saved = saved  # options and choice from a file
        self.model, self.settings, self.team = model, settings, team
        self.views, self.in_flight = views, in_flight
        self.host_limit: int | None = None  # for what all blocks of one forward move
        self.kind_of: dict[str, Kind] = {}
        self.order: list[str] = []  # blocks in the order of their forwards
        self.numbers: dict[str, int] = {}  # of their options
        self.forwards: dict[str, PlannedModule] = {}
        self.device = device_of_parameters(model)
        self._kinds: dict[Hashable, Kind] = {}
        self._whole: set[str] = set()  # blocks that run as plain PyTorch's
        self._error: Exception | None = None
        self._is_meeting = False  # inside a block, between its collectives
        self._tested: set[tuple[int, int]] = set()  # kinds and numbers of options

    @property
    def is_spread(self) -> bool:
        """Whether a block has collectives inside."""
        return any(kind.is_spread for kind in self._kinds.values())

    def meet(self, call: Call) -> None:
        """Run a step in which every kind of block is recorded, and gets its options.

        Raises:
            UnsupportedModuleError: no block can be planned.
            RockmateError, rkgb.RkgbError: one of them cannot.
        """
        self._agree_on_a_link()
        self.note("recording blocks")
        self._run(call, self._meet)
        if not self.order:
            found = "is called, and trained, in its forward. Name blocks that are"
            if self._whole:
                found = "can be recorded. Wrap the whole model, or mend what the log names"
            raise UnsupportedModuleError(
                f"none of the {len(self.views)} blocks of {type(self.model).__name__} {found}."
            )
        self._share_options()

    def _agree_on_a_link(self) -> None:
        """Give all processes the first one's link, and each forward in flight a part of the place.

        All blocks hold what they move at the turn. How much each of them moves is chosen later.
        """
        where, most_bytes, saved = self.settings.offload, self.settings.host_bytes, self.saved
        if where is None:
            if saved is not None and moves_any(saved):
                raise mismatch(["offload: storages move in the file, offload=None here"])
            return
        link = None if saved is None else saved.link
        with self.team.together():
            if saved is None and self.team.is_first:
                place = offload_of(where, self.device, None)
                link = None if place is None else place.link
        link = self.team.gather(link)[0]
        if link is None:  # nothing moves in the file
            self.settings = replace(self.settings, offload=None, host_budget=None)
            return
        if most_bytes is not None:
            self.host_limit = max(1, most_bytes // self.in_flight)
        self.settings = replace(self.settings, link=link, host_budget=self.host_limit)

    def _run(self, call: Call, work: Callable[..., Any]) -> None:
        """Run one step in which `work` replaces every block's forward; raise errors of the step."""
        self.install({p: _Intercepted(p, view, work) for p, view in self.views.items()})
        self.step(call)
        self.team.raise_together(self._error)

    def step(self, call: Call) -> None:
        with self.team.in_step():
            try:
                run_step(self.model, call, self.device)
            except Exception as error:
                if self._error is None:
                    raise
                raise self._error from error  # what came first

    def test_once(self, call: Call) -> None:
        """Compare the present options with plain PyTorch, if the user wants a self-test."""
        pairs = {(id(self.kind_of[path]), number) for path, number in self.numbers.items()}
        if not self.settings.self_test or pairs <= self._tested:
            return
        self.note("self test")
        if self.settings.self_test == "deterministic":
            with deterministic_algorithms():
                self._run(call, self._test)
            self._tested.clear()
            self.take(self.numbers, anew=True)  # drops recordings for the test's kernels
        self._run(call, self._test)

    def _share_options(self) -> None:
        """Give all processes the options of the first, each with its own bytes."""
        orders = self.team.gather(self.order)
        self.team.raise_together(self._unlike(any(order != self.order for order in orders)))
        self._share([kind for kind in self._kinds.values() if not kind.is_shared])

    def _share(self, kinds: Sequence[Kind]) -> None:
        """Give these kinds the options of the first process, and its least one."""
        mine = [(kind.shape, kind.ways, kind.least) for kind in kinds]
        rows = self.team.gather(mine)
        shapes = [[shape for shape, *_ in row] for row in rows]
        self.team.raise_together(self._unlike(any(other != shapes[0] for other in shapes)))
        with self.team.together():
            for kind, (_, ways, least) in zip(kinds, rows[0], strict=True):
                kind.take(ways, least)

    def _unlike(self, is_so: bool) -> Exception | None:
        if not is_so:
            return None
        return UnsupportedModuleError(
            f"the processes that share this {type(self.model).__name__} have recorded other "
            "blocks each. Give all of them samples of one kind."
        )

    def install(self, forwards: Mapping[str, PlannedModule]) -> None:
        """Put these forwards into the blocks."""
        for path, forward in forwards.items():
            vars(self.views[path])["_rockmate"] = forward

    def _meet(self, block: _Intercepted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Plan a block that is called for the first time, and run it."""
        runs_plain = block.path in self._whole or not _trains(block.model, args, kwargs)
        if self._error is not None or runs_plain:
            return block.model.forward(*args, **kwargs)
        try:
            if is_in_checkpoint():
                raise UnsupportedModuleError(
                    f"the block '{block.path}' is called inside of a checkpoint, which drops what "
                    "its plan keeps. Plan without the checkpoint "
                    "(model.gradient_checkpointing_disable() of transformers): the plan saves "
                    "memory already, in less time."
                )
            if block.path in self.kind_of:
                raise UnsupportedModuleError(
                    f"the block '{block.path}' is called more than once in a step, and what its "
                    "calls keep cannot be chosen for each. Name blocks that are called once."
                )
            shards = is_sharded(self.model.get_submodule(block.path))
            kind = self._kind(block, args, kwargs, shards=shards)
        except Exception as error:  # others wait in the collectives of this step
            self._remember(error)
        if self._all_are_well(block):
            if kind.recorded.is_plain:
                self._leave_whole(block.path, kind)
                return block.model.forward(*args, **kwargs)
            try:
                if kind.is_spread and not kind.is_shared:
                    self._share([kind])  # before it runs its collectives in this step
                self.kind_of[block.path] = kind
                self.order.append(block.path)
                forward = self._forward(block.path, kind, kind.least)
                self.forwards[block.path] = forward
            except Exception as error:
                self._remember(error)
        if self._all_are_well(block) and isinstance(forward, LockstepModule):
            with self._meeting(block.model):
                forward.prepare([(args, kwargs)])
        return self._go_on(block, args, kwargs)

    def _leave_whole(self, path: str, kind: Kind) -> None:
        """Run a block as plain PyTorch does, as code between the others."""
        self._whole.add(path)
        _log.warning(
            "the block '%s' (%s) runs whole and keeps all, because something in its forward cannot "
            "be recorded: Rockmate(block, its_input, strict=True) says what, and at which line",
            *(path, kind.recorded.network.basic.model_name),
        )

    def _all_are_well(self, block: _Intercepted) -> bool:
        """Return whether nothing has failed; for a block with collectives, in any process.

        It is called before collectives of a block, which all processes must run, or none.
        """
        if whole_parts(block.model):
            try:
                self.team.raise_together(self._error)
            except Exception as error:
                self._error = error
        return self._error is None

    def _go_on(self, block: _Intercepted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a block as planned, or plain if something has failed."""
        if self._all_are_well(block):
            try:
                with self._meeting(block.model):
                    return self.forwards[block.path](args, kwargs)
            except Exception as error:
                self._remember(error)
        return block.model.forward(*args, **kwargs)

    @contextlib.contextmanager
    def _meeting(self, model: nn.Module) -> Iterator[None]:
        """Mark that a block runs in which processes may wait for each other."""
        self._is_meeting = bool(whole_parts(model))
        yield
        self._is_meeting = False  # not after an error, which left it inside

    def _remember(self, error: Exception) -> None:
        """Keep an error until the step is over, if the other processes can finish the step.

        Raises:
            Exception: the error itself, if other processes are inside the block.
        """
        if self._is_meeting:
            raise error
        self._error = error

    def _test(self, block: _Intercepted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compare the chosen option of a block with plain PyTorch, and run it."""
        forward = self.forwards.get(block.path)
        if forward is None or self._error is not None:
            return block.model.forward(*args, **kwargs)
        try:
            planned = forward.known[0]
            # By number, because bytes may be equal here and differ in other processes, which
            # would then run the test.
            key = id(self.kind_of[block.path]), self.numbers[block.path]
            if key not in self._tested:
                self._tested.add(key)
                bare = without_hooks(block.model, type(block.model))
                with plain():
                    given = Sample.of(bare, args, in_order(kwargs))
                    is_spread = self.kind_of[block.path].is_spread
                    anyone = self.team.anyone if is_spread else bool
                    with self._meeting(bare):
                        eager = eager_step(bare, given, planned.network, "fingerprints", anyone)
                        self_test(planned, bare, given, eager, anyone)
        except Exception as error:  # others wait in the collectives of this step
            self._remember(error)
        return self._go_on(block, args, kwargs)

    def _kind(
        self, block: _Intercepted, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, shards: bool
    ) -> Kind:
        ordered, model, opaque = in_order(kwargs), block.model, self._opaque_in(block.path)
        facts = facts_of_calls(model, (args, ordered))
        key = (own_class(type(model)), facts, shards, opaque)
        if key not in self._kinds:
            refuse_shards_inside(model)
            bare = without_hooks(model, type(model))
            whole = whole_parts(bare)
            settings = replace(
                self.settings, budget=_EVERYTHING, self_test=False, opaque=(*opaque, *whole)
            )
            if whole:  # the processes would have to cut it together
                settings = replace(settings, split=False)
            with self._meeting(bare):
                recorded, cutting = recorded_block(bare, (args, ordered), settings)
            networks: dict[Hashable, Network] = {None: recorded.network}
            if self.saved is not None:
                shape = len(recorded.problem.nodes), recorded.problem.backward_order
                ways = ways_for(self.saved, len(self._kinds), shape)
                if cutting is not None:
                    own = {how: cutting.cut_as(how) for how, *_ in ways if how is not None}
                    networks.update(own)
                try:
                    options = options_for(networks, ways)
                except InvalidPlanError as error:  # less may move here
                    raise mismatch([str(error)]) from None
            else:
                if cutting is not None:
                    networks.update(cutting.every())
                options = ways_to_run(networks, self.settings.backend, self._host_part)
            wanted = [local_part(p) for p in model.parameters() if p.requires_grad and shards]
            gathered = sum(p.numel() * p.element_size() for p in wanted)
            self._kinds[key] = Kind(
                recorded, options, networks, gathered, bool(whole), self._host_part
            )
        return self._kinds[key]

    @property
    def _host_part(self) -> int | None:
        return None if self.host_limit is None else self.host_limit // len(self.views)

    def _opaque_in(self, path: str) -> tuple[str, ...]:
        """Return the user's opaque submodules inside a block, by their paths there."""
        inside = (p for p in self.settings.opaque if p.startswith(f"{path}."))
        return tuple(p.removeprefix(f"{path}.") for p in inside)

    def _forward(self, path: str, kind: Kind, number: int) -> PlannedModule:
        planned, option = kind.planned(number), kind.options[number]
        settings = replace(
            self.settings,
            budget=planned.budget_bytes,
            self_test=self.settings.self_test
            and not kind.is_spread,  # `_test` compares, on all processes
            most_kept_bytes=option.saved_bytes,
            host_budget=None if self.host_limit is None else max(1, option.host_bytes),
            opaque=self._opaque_in(path),
        )
        make = LockstepModule if kind.is_spread else PlannedModule
        forward = make(self.views[path], settings)
        before = None if kind.is_spread else self.forwards.get(path)
        if before is not None and all(kind.has_option_of(p, option) for p in before.plans):
            forward.take_plans_of(before, lambda own: kind.of_block(own, option))
        forward.known = (planned,)
        return forward

    def take(self, numbers: Mapping[str, int], *, anew: bool = False) -> None:
        """Set the options of all blocks; what was recorded of them serves, if not `anew`."""
        self.numbers = dict(numbers)
        if anew:
            self.forwards = {}
        with self.team.together():
            self.forwards = {
                path: self._forward(path, self.kind_of[path], number)
                for path, number in numbers.items()
            }


def _trains(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if not torch.is_grad_enabled() or is_plain() or not any(m.training for m in model.modules()):
        return False
    leaves, _ = key_of(args, in_order(kwargs))
    wanting = [t for t in (*leaves, *model.parameters()) if isinstance(t, Tensor)]
    return any(tensor.requires_grad for tensor in wanting)
