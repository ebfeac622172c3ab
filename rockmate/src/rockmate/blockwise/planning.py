"""From a model and its blocks to a planned forward for each of them, chosen together.

meet     one step: at the first call of each kind of block, it is recorded, measured and gets its
         options (an engine has gathered its parameters by then); every block runs with the option
         that keeps least
measure  one step: the memory at every border of a block, including code between blocks
choose   an option for every block
test     one step: at the call of a block, each new option against plain PyTorch, bit by bit
measure  one step: the peak of the whole; if it is over the budget, choose again with this figure
prepare  where a loss outside is not known yet: the same for what budgets up to a larger one choose

All processes take part in a step of a sharded model. So an error in a block is kept until the step
is over, and all processes then raise it. An error between collectives ends the step (see team.py).
Between the steps processes exchange their results: the options are the first process's, each one
simulates them on its own sizes, and the largest bytes count.
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
    call_of,
    options_for,
    recorded_block,
    refuse_shards_inside,
    ways_to_run,
)
from rockmate.blockwise.lockstep import LockstepModule
from rockmate.blockwise.rehearsal import END, TURN, Marker, marked, run_step, trace_step
from rockmate.blockwise.report import ChosenBlocks
from rockmate.blockwise.saved_blocks import mismatch, moves_any, numbers_for, over_budget, ways_for
from rockmate.blockwise.team import Team
from rockmate.calls.planned_module import PlannedModule
from rockmate.comparison.deterministic import deterministic_algorithms
from rockmate.errors import InfeasibleBudgetError, InvalidPlanError, UnsupportedModuleError
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
from rockmate.options.module_choice import (
    Choice,
    StepMemory,
    choose,
    largest,
    measured_as,
    only,
    peak_of,
    smallest_budget,
)
from rockmate.requests.identity import facts_of_calls
from rockmate.runtime.plain import is_plain, plain
from rockmate.settings import Terms

_log = logging.getLogger("rockmate")
_EVERYTHING = 1 << 62  # a budget that keeps everything, for recording and measuring a block
_MANY_STEPS = 3  # for one measurement, if sending threads disturb it
_MOST_TRIES = 5  # to choose again after a step that took more than predicted
_RUNGS = 8  # budgets whose choices are tested ahead


class _Intercepted(PlannedModule):
    """Replaces the forward of a block in a step that is run for planning: it calls `call`."""

    def __init__(self, path: str, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__(model, Terms(_EVERYTHING))
        self.path, self.call = path, call

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.call(self, *settled_call(args, kwargs))


class BlockPlanner:
    """Plans the blocks of one model on one call."""

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
        self.kinds: dict[Hashable, Kind] = {}
        self.kind_of: dict[str, Kind] = {}
        self.whole: set[str] = set()  # blocks that run as plain PyTorch's
        self.order: list[str] = []  # blocks in the order of their forwards
        self.numbers: dict[str, int] = {}  # of their options
        self.forwards: dict[str, PlannedModule] = {}
        self.error: Exception | None = None
        self.is_meeting = False  # inside a block, between its collectives
        self.tested: set[tuple[int, int]] = set()  # kinds and numbers of options
        self.device = device_of_parameters(model)

    def plan(
        self, calls: Sequence[Call], room: Callable[[int], int], loss_bytes: int = 0
    ) -> ChosenBlocks:
        """Return a planned forward for every block; `room` maps the peak keeping all to the budget.

        The options are chosen for the first call, and checked with the others. With `loss_bytes`,
        what a loss outside may take of the memory, choices for other budgets are made ready.

        Raises:
            InfeasibleBudgetError: no choice fits; `minimum_bytes` is the smallest budget that does.
            RockmateError, rkgb.RkgbError: a block cannot be planned.
        """
        call, *others = calls
        self._agree_on_a_link()
        self.note("recording blocks")
        self._run(call, self._meet)
        if not self.order:
            found = "is called, and trained, in its forward. Name blocks that are"
            if self.whole:
                found = "can be recorded. Wrap the whole model, or mend what the log names"
            raise UnsupportedModuleError(
                f"none of the {len(self.views)} blocks of {type(self.model).__name__} {found}."
            )
        self._share_options()
        if self.saved is not None:
            chosen = self._followed(self.saved, call, room)
        else:
            chosen = self._searched(call, room)
        for other in others:
            self._hold(other, chosen.budget_bytes)
        most_bytes = chosen.budget_bytes + min(self.team.gather(loss_bytes))
        # What is spread would have to be recorded again, with its collectives.
        is_spread = any(kind.is_spread for kind in self.kinds.values())
        if is_spread or most_bytes == chosen.budget_bytes:
            return chosen
        return replace(chosen, tested=self._tested(calls, chosen, most_bytes))

    def _agree_on_a_link(self) -> None:
        """Give all processes the first one's link, and blocks equal parts of what is there.

        All blocks hold what they move at the turn, for each forward in flight.
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
        part = None
        if most_bytes is not None:
            part = max(1, most_bytes // (len(self.views) * self.in_flight))
        self.settings = replace(self.settings, link=link, host_budget=part)

    def _hold(self, call: Call, budget: int) -> None:
        """Run a planned step of another call, and check its peak against the budget."""
        self.note("other samples")
        with self._in_place(self.forwards), self.team.in_step():
            peak = trace_step(self.model, call, self.device, Marker())[0]
        peak = max(self.team.gather(peak)) * self.in_flight
        if peak > budget:
            raise InfeasibleBudgetError(
                f"a sample other than the one that the blocks of {type(self.model).__name__} were "
                f"planned for takes {peak} bytes, and the budget is {budget}. Raise it to {peak}",
                asked_bytes=budget,
                minimum_bytes=peak,
            )

    def _searched(self, call: Call, room: Callable[[int], int]) -> ChosenBlocks:
        """Return options chosen for a call, after steps have shown that they fit."""
        self.note("measuring a step")
        self._take({path: self.kind_of[path].least for path in self.order})
        memory = self._measure(call)[1]
        keeping_all = peak_of(memory, [0] * len(memory.calls))
        budget = min(self.team.gather(room(keeping_all)))
        memory, choice, measured = self._fitting(call, memory, budget)
        return self._chosen(memory, choice, measured, keeping_all, budget)

    def _fitting(
        self, call: Call, memory: StepMemory, budget: int
    ) -> tuple[StepMemory, Choice, int]:
        """Return a choice whose step was within the budget, its peak, and what was measured."""
        for _ in range(_MOST_TRIES):
            choice = self._choose(memory, budget)
            self._take(self._numbers(choice.options))
            self._test_once(call)
            measured, found = self._measured_peak(call)
            if measured <= budget:
                return memory, choice, measured
            _log.info("%d bytes over the budget: choosing again", measured - budget)
            memory = largest([memory, measured_as(found, memory)])
        raise InfeasibleBudgetError(
            f"the blocks of {type(self.model).__name__} took {measured} bytes with a budget of "
            f"{budget}, which predictions did not show. Raise the budget",
            asked_bytes=budget,
            minimum_bytes=measured,
        )

    def _measured_peak(self, call: Call) -> tuple[int, StepMemory]:
        """Return the peak of a step, the largest of all processes, and its memory."""
        self.note("measuring a step")
        peak, found = self._measure(call)
        return max(self.team.gather(peak + (self.in_flight - 1) * found.held_bytes)), found

    def _numbers(self, options: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.order, options, strict=True))

    def _tested(
        self, calls: Sequence[Call], chosen: ChosenBlocks, most_bytes: int
    ) -> StepMemory | None:
        """Test and measure what budgets up to `most_bytes` choose; None if other calls exceed them.

        The choice stays. The memory of such steps must be there.
        """
        least_bytes = smallest_budget(chosen.memory)
        span_bytes = max(0, most_bytes - least_bytes)
        budgets = [least_bytes + span_bytes * rung // _RUNGS for rung in range(_RUNGS + 1)]
        found = [choose(chosen.memory, budget) for budget in budgets]
        tested = dict.fromkeys(c.options for c in (*found, chosen.choice) if c is not None)
        for options in tested:
            self._take(self._numbers(options))
            self._test_once(calls[0])
        try:
            memory, largest_choice, _ = self._fitting(calls[0], chosen.memory, most_bytes)
            for other in calls[1:]:
                self._hold(other, most_bytes)
        except InfeasibleBudgetError as error:
            _log.info("the estimate of what a loss takes will stay: %s", error)
            return None
        finally:
            self._take(self._numbers(chosen.choice.options))
        rows = zip(*(*tested, largest_choice.options), strict=True)
        return only(memory, [set(row) for row in rows])

    def choose_again(
        self, chosen: ChosenBlocks, budget: int, tested: StepMemory
    ) -> ChosenBlocks | None:
        """Choose for another budget among options that are `tested`; nothing is run.

        None means that nothing fits.
        """
        choice = choose(tested, budget)
        if choice is None:
            return None
        self._take(self._numbers(choice.options))
        measured, keeping_all = chosen.measured_peak_bytes, chosen.keeping_all_bytes
        again = self._chosen(chosen.memory, choice, measured, keeping_all, budget)
        return replace(again, tested=chosen.tested)

    def _chosen(
        self, memory: StepMemory, choice: Choice, measured: int, keeping_all: int, budget: int
    ) -> ChosenBlocks:
        for forward in self.forwards.values():
            if isinstance(forward, LockstepModule):
                forward.is_sealed = True
        kinds = {path: self.kind_of[path] for path in self.order}
        return ChosenBlocks(self.forwards, kinds, memory, choice, measured, keeping_all, budget)

    def _followed(self, saved: SavedBlocks, call: Call, room: Callable[[int], int]) -> ChosenBlocks:
        """Return the choice of a file, after a step has shown that it fits on all processes."""
        with self.team.together():
            kinds = {path: self.kind_of[path] for path in self.order}
            numbers = numbers_for(saved, kinds, self.in_flight)
        self._take(numbers)
        self._test_once(call)
        measured, memory = self._measured_peak(call)
        keeping_all = peak_of(memory, [0] * len(memory.calls))
        budget = min(self.team.gather(room(keeping_all)))
        if measured > budget:
            raise over_budget(measured, budget)
        options = tuple(numbers.values())
        time_ms = sum(block.overhead_ms for block in saved.blocks)
        choice = Choice(options, peak_of(memory, options), time_ms)
        return self._chosen(memory, choice, measured, keeping_all, budget)

    # ------------------------------------------------------------------ steps

    def _run(self, call: Call, work: Callable[..., Any]) -> None:
        """Run one step in which `work` replaces every block's forward; raise errors of the step."""
        with self._in_place({p: _Intercepted(p, view, work) for p, view in self.views.items()}):
            self._step(call)
        self.team.raise_together(self.error)

    def _step(self, call: Call) -> None:
        with self.team.in_step():
            try:
                run_step(self.model, call, self.device)
            except Exception as error:
                if self.error is None:
                    raise
                raise self.error from error  # what came first

    def _test_once(self, call: Call) -> None:
        """Compare the present options with plain PyTorch, if the user wants a self-test."""
        pairs = {(id(self.kind_of[path]), number) for path, number in self.numbers.items()}
        if not self.settings.self_test or pairs <= self.tested:
            return
        self.note("self test")
        if self.settings.self_test == "deterministic":
            with deterministic_algorithms():
                self._run(call, self._test)
            self.tested.clear()
            self._take(self.numbers, anew=True)  # drops recordings for the test's kernels
        self._run(call, self._test)

    def _share_options(self) -> None:
        """Give all processes the options of the first, each with its own bytes."""
        orders = self.team.gather(self.order)
        self.team.raise_together(self._unlike(any(order != self.order for order in orders)))
        self._share([kind for kind in self.kinds.values() if not kind.is_shared])

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

    @contextlib.contextmanager
    def _in_place(self, forwards: Mapping[str, PlannedModule]) -> Any:
        """Install these forwards in the blocks."""
        for path, forward in forwards.items():
            vars(self.views[path])["_rockmate"] = forward
        yield

    def _meet(self, block: _Intercepted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Plan a block that is called for the first time, and run it."""
        runs_plain = block.path in self.whole or not _trains(block.model, args, kwargs)
        if self.error is not None or runs_plain:
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
        self.whole.add(path)
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
                self.team.raise_together(self.error)
            except Exception as error:
                self.error = error
        return self.error is None

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
        self.is_meeting = bool(whole_parts(model))
        yield
        self.is_meeting = False  # not after an error, which left it inside

    def _remember(self, error: Exception) -> None:
        """Keep an error until the step is over, if the other processes can finish the step.

        Raises:
            Exception: the error itself, if other processes are inside the block.
        """
        if self.is_meeting:
            raise error
        self.error = error

    def _test(self, block: _Intercepted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compare the chosen option of a block with plain PyTorch, and run it."""
        forward = self.forwards.get(block.path)
        if forward is None or self.error is not None:
            return block.model.forward(*args, **kwargs)
        try:
            planned = forward.known[0]
            # By number, because bytes may be equal here and differ in other processes, which
            # would then run the test.
            key = id(self.kind_of[block.path]), self.numbers[block.path]
            if key not in self.tested:
                self.tested.add(key)
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
        if key not in self.kinds:
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
                ways = ways_for(self.saved, len(self.kinds), shape)
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
                options = ways_to_run(networks, self.settings.backend)
            wanted = [local_part(p) for p in model.parameters() if p.requires_grad and shards]
            gathered = sum(p.numel() * p.element_size() for p in wanted)
            self.kinds[key] = Kind(recorded, options, networks, gathered, bool(whole))
        return self.kinds[key]

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
            opaque=self._opaque_in(path),
        )
        make = LockstepModule if kind.is_spread else PlannedModule
        forward = make(self.views[path], settings)
        before = None if kind.is_spread else self.forwards.get(path)
        if before is not None and all(kind.has_option_of(p, option) for p in before.plans):
            forward.take_plans_of(before, lambda own: kind.of_block(own, option))
        forward.known = (planned,)
        return forward

    def _take(self, numbers: Mapping[str, int], *, anew: bool = False) -> None:
        """Set the options of all blocks; what was recorded of them serves, if not `anew`."""
        self.numbers = dict(numbers)
        if anew:
            self.forwards = {}
        with self.team.together():
            self.forwards = {
                path: self._forward(path, self.kind_of[path], number)
                for path, number in numbers.items()
            }

    # ------------------------------------------------------------------ memory

    def _measure(self, call: Call) -> tuple[int, StepMemory]:
        """Return the peak of a step with the present options, and the memory at borders of blocks.

        The peak is this process's, the memory the largest of all processes.
        """
        marker, times = Marker(), _MANY_STEPS if self.team.groups else 1
        with self._in_place(self.forwards), contextlib.ExitStack() as stack:
            if any(not forward.plans.families for forward in self.forwards.values()):
                self._step(call)  # each block records its program
            for place, path in enumerate(self.order):
                executor = next(iter(self.forwards[path].plans)).executor
                stack.enter_context(marked(executor, place, marker))
            with self.team.in_step():
                peak, marks = trace_step(self.model, call, self.device, marker, times)
        calls = []
        spots = {mark.name: mark for mark in marks}
        with self.team.together():
            self._refuse_another_order([mark.name for mark in marks])
            for place, path in enumerate(self.order):
                kind = self.kind_of[path]
                calls.append(call_of(path, kind, self.numbers[path], spots, place))
        turn, before = spots[TURN], spots["begin"].next_peak_bytes
        memory = StepMemory(tuple(calls), before, turn.next_peak_bytes, turn.bytes, self.in_flight)
        return peak, largest(self.team.gather(memory))

    def _refuse_another_order(self, names: Sequence[str]) -> None:
        count = len(self.order)
        forwards = [f"F{i} {what}" for i in range(count) for what in ("begins", "ends")]
        backwards = [f"B{i} {what}" for i in reversed(range(count)) for what in ("begins", "ends")]
        if list(names) != ["begin", *forwards, TURN, *backwards, END]:
            raise UnsupportedModuleError(
                f"the blocks of {type(self.model).__name__} do not run their backwards one by one "
                "in the reverse order of their forwards, so that what they keep cannot be counted. "
                "Name a chain of blocks, outside of checkpoints."
            )

    def _choose(self, memory: StepMemory, budget: int) -> Choice:
        choice = choose(memory, budget)
        if choice is None:
            least = smallest_budget(memory)
            raise InfeasibleBudgetError(
                f"the {len(self.order)} blocks of {type(self.model).__name__} cannot be run within "
                f"{budget} bytes: planned module by module, the whole step needs {least}. Raise "
                f"the budget to at least {least} bytes, or reduce the batch size",
                asked_bytes=budget,
                minimum_bytes=least,
            )
        return choice


def _trains(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if not torch.is_grad_enabled() or is_plain() or not any(m.training for m in model.modules()):
        return False
    leaves, _ = key_of(args, in_order(kwargs))
    wanting = [t for t in (*leaves, *model.parameters()) if isinstance(t, Tensor)]
    return any(tensor.requires_grad for tensor in wanting)
