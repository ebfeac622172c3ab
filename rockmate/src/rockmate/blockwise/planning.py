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
from collections.abc import Callable, Sequence
from dataclasses import replace

from rockmate.arguments import Call
from rockmate.blockwise.kinds import LockstepModule, call_of
from rockmate.blockwise.recorded import RecordedBlocks
from rockmate.blockwise.rehearsal import END, TURN, Marker, marked, trace_step
from rockmate.blockwise.report import ChosenBlocks
from rockmate.blockwise.saved_blocks import mismatch, numbers_for, over_budget
from rockmate.errors import InfeasibleBudgetError, UnsupportedModuleError
from rockmate.files.plan_file import SavedBlocks
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

_log = logging.getLogger("rockmate")
_MANY_STEPS = 3  # for one measurement, if sending threads disturb it
_MOST_TRIES = 5  # to choose again after a step that took more than predicted
_RUNGS = 8  # budgets whose choices are tested ahead


class BlockPlanner:
    """Chooses an option for each block of one model."""

    def __init__(self, blocks: RecordedBlocks) -> None:
        self.blocks = blocks
        self.model, self.team, self.device = blocks.model, blocks.team, blocks.device
        self.in_flight = blocks.in_flight

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
        self.blocks.meet(call)
        saved = self.blocks.saved
        if saved is not None:
            chosen = self._followed(saved, call, room)
        else:
            chosen = self._searched(call, room)
        for other in others:
            self._hold(other, chosen.budget_bytes)
        most_bytes = chosen.budget_bytes + min(self.team.gather(loss_bytes))
        # What is spread would have to be recorded again, with its collectives.
        if self.blocks.is_spread or most_bytes == chosen.budget_bytes:
            return chosen
        return replace(chosen, tested=self._tested(calls, chosen, most_bytes))

    def _hold(self, call: Call, budget: int) -> None:
        """Run a planned step of another call, and check its peak against the budget."""
        self.blocks.note("other samples")
        self.blocks.install(self.blocks.forwards)
        with self.team.in_step():
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
        self.blocks.note("measuring a step")
        self.blocks.take({path: self.blocks.kind_of[path].least for path in self.blocks.order})
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
            self.blocks.take(self._numbers(choice.options))
            self.blocks.test_once(call)
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
        self.blocks.note("measuring a step")
        peak, found = self._measure(call)
        return max(self.team.gather(peak + (self.in_flight - 1) * found.held_bytes)), found

    def _numbers(self, options: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.blocks.order, options, strict=True))

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
            self.blocks.take(self._numbers(options))
            self.blocks.test_once(calls[0])
        try:
            memory, largest_choice, _ = self._fitting(calls[0], chosen.memory, most_bytes)
            for other in calls[1:]:
                self._hold(other, most_bytes)
        except InfeasibleBudgetError as error:
            _log.info("the estimate of what a loss takes will stay: %s", error)
            return None
        finally:
            self.blocks.take(self._numbers(chosen.choice.options))
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
        self.blocks.take(self._numbers(choice.options))
        measured, keeping_all = chosen.measured_peak_bytes, chosen.keeping_all_bytes
        again = self._chosen(chosen.memory, choice, measured, keeping_all, budget)
        return replace(again, tested=chosen.tested)

    def _chosen(
        self, memory: StepMemory, choice: Choice, measured: int, keeping_all: int, budget: int
    ) -> ChosenBlocks:
        for forward in self.blocks.forwards.values():
            if isinstance(forward, LockstepModule):
                forward.is_sealed = True
        kinds = {path: self.blocks.kind_of[path] for path in self.blocks.order}
        return ChosenBlocks(
            self.blocks.forwards, kinds, memory, choice, measured, keeping_all, budget
        )

    def _followed(self, saved: SavedBlocks, call: Call, room: Callable[[int], int]) -> ChosenBlocks:
        """Return the choice of a file, after a step has shown that it fits on all processes."""
        with self.team.together():
            kinds = {path: self.blocks.kind_of[path] for path in self.blocks.order}
            numbers = numbers_for(saved, kinds, self.in_flight)
        taken = sum(kinds[path].options[n].host_bytes for path, n in numbers.items())
        if self.blocks.host_limit is not None and taken > self.blocks.host_limit:
            raise mismatch(
                [f"moves take {taken} bytes elsewhere, {self.blocks.host_limit} are allowed here"]
            )
        self.blocks.take(numbers)
        self.blocks.test_once(call)
        measured, memory = self._measured_peak(call)
        keeping_all = peak_of(memory, [0] * len(memory.calls))
        budget = min(self.team.gather(room(keeping_all)))
        if measured > budget:
            raise over_budget(measured, budget)
        options = tuple(numbers.values())
        time_ms = sum(block.overhead_ms for block in saved.blocks)
        choice = Choice(options, peak_of(memory, options), time_ms)
        return self._chosen(memory, choice, measured, keeping_all, budget)

    def _measure(self, call: Call) -> tuple[int, StepMemory]:
        """Return the peak of a step with the present options, and the memory at borders of blocks.

        The peak is this process's, the memory the largest of all processes.
        """
        marker, times = Marker(), _MANY_STEPS if self.team.groups else 1
        self.blocks.install(self.blocks.forwards)
        with contextlib.ExitStack() as stack:
            if any(not forward.plans.families for forward in self.blocks.forwards.values()):
                self.blocks.step(call)  # each block records its program
            for place, path in enumerate(self.blocks.order):
                executor = next(iter(self.blocks.forwards[path].plans)).executor
                stack.enter_context(marked(executor, place, marker))
            with self.team.in_step():
                peak, marks = trace_step(self.model, call, self.device, marker, times)
        calls = []
        spots = {mark.name: mark for mark in marks}
        with self.team.together():
            self._refuse_another_order([mark.name for mark in marks])
            for place, path in enumerate(self.blocks.order):
                kind = self.blocks.kind_of[path]
                calls.append(call_of(path, kind, self.blocks.numbers[path], spots, place))
        turn, before = spots[TURN], spots["begin"].next_peak_bytes
        memory = StepMemory(
            *(tuple(calls), before, turn.next_peak_bytes, turn.bytes, self.in_flight),
            host_limit=self.blocks.host_limit,
        )
        return peak, largest(self.team.gather(memory))

    def _refuse_another_order(self, names: Sequence[str]) -> None:
        count = len(self.blocks.order)
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
                f"the {len(self.blocks.order)} blocks of {type(self.model).__name__} cannot be run "
                f"within {budget} bytes: planned module by module, the whole step needs {least}. "
                f"Raise the budget to at least {least} bytes, or reduce the batch size",
                asked_bytes=budget,
                minimum_bytes=least,
            )
        return choice
