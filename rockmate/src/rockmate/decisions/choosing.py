"""From a root, a call and a budget to a step plan: find blocks, and choose an option for each call.

meet     one step: blocks are recorded at their calls, and run with the option that keeps least
measure  one step: the memory at the begin and end of each call, with the options that keep least
choose   an option for each call, from kept bytes and positions of calls; the rest of the measured
         memory belongs to code between blocks and to gradients
test     one step against plain PyTorch, in bits and bytes; then choose again with these figures,
         until the budget is nearly used or nothing faster fits

Whole steps are run on the model itself, which is restored afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements import flatten
from rkgb.engine import Sample
from rkgb.graphs import BasicGraph
from rkgb.torch_api import TakingMost, noting_calls
from rockmate.arguments import Call
from rockmate.blockwise.rehearsal import TURN, Mark, Marker, find_what_changes, trace_step
from rockmate.blockwise.rehearsal import run_step as rehearse
from rockmate.comparison.eager import StepResult, differences, run_step
from rockmate.decisions.blocks import EVERYTHING, KEEP, HowToRun, WrittenOutsideError, shapes_of
from rockmate.decisions.dressing import undressed
from rockmate.decisions.meeting import Meeting, place_of
from rockmate.decisions.plain_step import KeptParameters, plain_step
from rockmate.decisions.report import DecidedPlan, report
from rockmate.decisions.step_plan import Nodes, StepPlan
from rockmate.errors import InfeasibleBudgetError, RockmateError, SelfTestError
from rockmate.guards.module_watch import without_hooks
from rockmate.options.module_choice import ModuleCall, StepMemory, choose, peak_of, smallest_budget
from rockmate.settings import Terms, parse_budget

_log = logging.getLogger("rockmate")
_MOST_TRIES = 8
_NEAR = 0.98  # of the budget; a choice above it is good enough
_STEP = 0.005  # of the budget; the search ends at this resolution


class NoBlocksError(RockmateError):
    """No submodule that the root calls could save less."""


@dataclass(frozen=True, eq=False)
class ChosenStep:
    """A step plan with its report."""

    step: StepPlan
    report: DecidedPlan
    eager_peak_bytes: int | None


def plan_step(
    model: nn.Module,
    call: Call,
    settings: Terms,
    whole: Sequence[str],
    why: str,
    *,
    may_be_plain: bool = False,
) -> ChosenStep:
    """Return a plan for a root whose submodules `whole` cannot be recorded.

    A budget that is a fraction is one of what a plain step takes. A root without blocks gets a plan
    if it `may_be_plain`, and a plain step is within the budget.

    Raises:
        NoBlocksError: no submodule could save less.
        InfeasibleBudgetError: no choice fits; `minimum_bytes` is the smallest budget that does.
        SelfTestError: the step disagrees with plain PyTorch.
    """
    bare = without_hooks(model, type(model))
    sample = Sample.of(bare, *call)
    parameters = KeptParameters(model)
    with parameters.kept(bare, sample):
        find_what_changes(bare, [_own_call(sample)], sample.device)
        with contextlib.suppress(torch.OutOfMemoryError):
            rehearse(bare, _own_call(sample), sample.device)  # what its backward changes
    with noting_calls() as by_values:
        eager = plain_step(bare, sample, parameters)
    budget_bytes, fraction = parse_budget(settings.budget)
    if budget_bytes is None:
        if eager is None or fraction is None:
            raise NoBlocksError("a plain step, of which the budget is a share, does not fit")
        budget_bytes = int(fraction * eager.allocated_peak_bytes)
    for plans in (True, False):
        try:
            planner = _Planner(
                bare, type(model).__name__, sample, parameters, settings, eager, plans=plans
            )
            planner.takes_by_values = bool(by_values)
            planner.meet(whole)
            return planner.chosen(budget_bytes, why)
        except NoBlocksError as none:
            room = budget_bytes - settings.reserve
            if not may_be_plain or eager is None or eager.allocated_peak_bytes > room:
                raise
            why = f"{why} It runs plain: {none}."
            return _plain(type(model).__name__, why, budget_bytes, eager)
        except InfeasibleBudgetError:
            raise
        except Exception as error:
            if not plans:
                raise
            _log.info("blocks of %s run again whole: %s", type(model).__name__, error)
    raise AssertionError("the last of them returns or raises")


def _plain(name: str, why: str, budget_bytes: int, eager: StepResult) -> ChosenStep:
    """Return a plan without blocks."""
    _log.warning("%s saves no memory: %s", name, why)
    made = report(name, why, (), (), (), budget_bytes, eager, eager)
    return ChosenStep(StepPlan(name, {}, {}, budget_bytes), made, eager.allocated_peak_bytes)


def _own_call(sample: Sample) -> Call:
    """Return the sample's call, with private gradients."""
    own = sample.detached()
    return own.args, own.keywords


class _Planner:
    def __init__(
        self,
        bare: nn.Module,
        name: str,
        sample: Sample,
        parameters: KeptParameters,
        settings: Terms,
        eager: StepResult | None,
        *,
        plans: bool,
    ) -> None:
        self.bare, self.name, self.sample, self.parameters = bare, name, sample, parameters
        self.call = _own_call(sample)
        self.settings, self.eager, self.plans = settings, eager, plans
        self.written: list[str] = []  # why blocks keep everything
        self.tested: dict[tuple[int, ...], StepResult] = {}
        self.own: Nodes | None = None
        self.takes_by_values = False

    def meet(self, whole: Sequence[str]) -> None:
        """Find the blocks and their options.

        Raises:
            NoBlocksError: there is none.
        """
        device, written = self.sample.device, frozenset[str]()
        while True:
            meeting = Meeting(self.bare, self.settings, whole, plans=self.plans, written=written)
            try:
                with self.parameters.kept(self.bare, self.sample):
                    rehearse(_Root(self.bare, meeting), self.call, device)
                break
            except WrittenOutsideError as found:  # each time another one
                written |= {found.group}
                _log.warning("%s: %s", self.name, found)
                self.written.append(str(found))
        meeting.settle()
        self.calls = meeting.calls
        if not self.calls:
            why = "; ".join(self.written)
            raise NoBlocksError(
                why or f"no submodule that {self.name} calls can keep less than it does"
            )
        with self.parameters.kept(self.bare, self.sample):
            self.unseen = meeting.unseen()
        self.blocks = meeting.blocks
        self.ends = [(seen, meeting.samples[seen.block.group]) for seen in meeting.ends]

    def chosen(self, budget_bytes: int, why: str) -> ChosenStep:
        """Return the fastest plan that was found within the budget.

        Raises:
            InfeasibleBudgetError: none was; `minimum_bytes` would suffice.
        """
        room = budget_bytes - self.settings.reserve
        least = [call.least for call in self.calls]
        memory, more_bytes = self._measure(least)
        first = self._test(least).allocated_peak_bytes
        beyond = first - peak_of(memory, least)
        smallest = choose(memory, smallest_budget(memory))
        ways = [least] if smallest is None else [least, list(smallest.options)]
        minimum = min(self._test(numbers).allocated_peak_bytes for numbers in ways)
        aside = more_bytes if minimum + more_bytes <= room else 0
        found = self._search(memory, room - aside, beyond, ways) if minimum <= room else None
        if found is None:
            minimum += self.settings.reserve
            raise InfeasibleBudgetError(
                f"the {len(self.blocks)} blocks of {self.name} cannot be run within {budget_bytes} "
                f"bytes; it is planned block by block: {why} The whole step needs {minimum}. "
                "Raise the budget to that, or reduce the batch size",
                asked_bytes=budget_bytes,
                minimum_bytes=minimum,
            )
        if more_bytes and not aside:
            _log.warning(
                "%d blocks of %s did not run in the sample's step; a step that runs them too may "
                "take up to %d bytes more than the budget of %d",
                len(self.unseen),
                self.name,
                more_bytes,
                budget_bytes,
            )
        step = self._test(found)
        made = report(
            self.name, why, self.calls, self.unseen, found, budget_bytes, step, self.eager
        )
        if place_of(self.settings) != (where := self.settings.offload):
            made = replace(made, offload=where)
            _log.warning(
                "offload=%r does nothing for %s, which decides itself how often it calls its "
                "blocks, so that host_budget=%r cannot be kept: %s",
                *(where, self.name, self.settings.host_budget, why),
            )
        eager_bytes = None if self.eager is None else self.eager.allocated_peak_bytes
        plan = self._step_plan(found, budget_bytes)
        plan.room_bytes = budget_bytes - step.allocated_peak_bytes
        if self.own is not None:
            around = self.own.most_between * len(self.unseen)  # has room, or has been told
            plan.most_nodes = self.own.total + around
        self._foresee(found)
        return ChosenStep(plan, made, eager_bytes)

    def _foresee(self, numbers: Sequence[int]) -> None:
        """Record backwards from sums of what the root returns, while no step holds memory."""
        chosen = dict(zip(self.calls, numbers, strict=True))
        for call, (args, kwargs) in self.ends:
            run = call.run(chosen[call]) if call in chosen else KEEP
            leaves = flatten((args, dict(kwargs)))[0]
            if not isinstance(run, str) and shapes_of(leaves) == call.shapes:
                bare = without_hooks(call.block.view, type(call.block.view))
                with undressed(), self.parameters.kept(self.bare, self.sample):
                    for planned in run.plans:  # the sample is a layer's that may be another
                        planned.foresee(bare, _wanting_as(planned.network.basic, leaves))

    def _search(
        self, memory: StepMemory, room: int, beyond: int, known: Sequence[Sequence[int]]
    ) -> Sequence[int] | None:
        """Return the fastest options that a test has shown to stay within `room` bytes.

        A step takes `beyond` bytes more than the model of its memory says. With other options this
        may differ, so each choice is tested.
        """
        fitting = [n for n in known if self._test(n).allocated_peak_bytes <= room]
        best = min(fitting, key=self._time, default=None)
        most = room - smallest_budget(memory)
        over: int | None = None  # where a choice took too much
        fits: int | None = None  # where one did not
        for _ in range(_MOST_TRIES):
            beyond = min(beyond, most)
            choice = choose(memory, room - beyond)
            if choice is None:
                break
            peak = self._test(choice.options).allocated_peak_bytes
            if peak <= room:
                if best is None or self._time(choice.options) < self._time(best):
                    best = choice.options
                if not self._time(best) or peak > _NEAR * room:
                    break
                fits, beyond = beyond, beyond - (room - peak)
            else:
                over, beyond = beyond, beyond + peak - room
                if over == most:
                    break
            if over is not None and fits is not None:
                if fits - over < _STEP * room:
                    break
                beyond = (over + fits) // 2
        return best

    def _time(self, numbers: Sequence[int]) -> float:
        pairs = zip(self.calls, numbers, strict=True)
        return sum(call.options[number].overhead_ms for call, number in pairs)

    def _step_plan(self, numbers: Sequence[int], budget_bytes: int = EVERYTHING) -> StepPlan:
        ways: dict[str, list[HowToRun]] = {}
        for call, number in zip(self.calls, numbers, strict=True):
            ways.setdefault(call.block.path, []).append(call.run(number))
        for call in self.unseen:
            ways[call.block.path] = [call.run(call.least)]
        blocks = {call.block.path: call.block for call in (*self.calls, *self.unseen)}
        fixed = {path: tuple(runs) for path, runs in ways.items()}
        return StepPlan(self.name, blocks, fixed, budget_bytes)

    def _measure(self, numbers: Sequence[int]) -> tuple[StepMemory, int]:
        """Return the memory of a step, and the bytes that blocks which did not run would add."""
        step, marker = self._step_plan(numbers), Marker()
        root = _Root(self.bare, step)
        step.marker = marker
        restore = self.parameters.restore
        with self.parameters.kept(self.bare, self.sample):
            _, marks = trace_step(root, self.call, self.sample.device, marker, restore=restore)
        spots = {mark.name: mark for mark in marks}
        calls = []
        for place, (call, number) in enumerate(zip(self.calls, numbers, strict=True)):
            begins, ends = spots[f"F{place} begins"], spots[f"F{place} ends"]
            options = call.options
            kept = options[number].saved_bytes
            calls.append(
                ModuleCall(
                    name=call.block.path,
                    options=options,
                    reference=number,
                    more_bytes=tuple(option.saved_bytes - kept for option in options),
                    forward_start_bytes=begins.bytes,
                    after_forward_bytes=ends.next_peak_bytes,
                    backward_base_bytes=begins.bytes,
                    after_backward_bytes=begins.bytes,
                )
            )
        turn = spots[TURN]
        memory = StepMemory(tuple(calls), spots["begin"].next_peak_bytes, turn.bytes, turn.bytes)
        return memory, self._more_bytes(spots)

    def _more_bytes(self, spots: Mapping[str, Mark]) -> int:
        """Return the bytes that blocks which did not run would keep, and the root around each."""
        around: dict[str, int] = {}
        for place, call in enumerate(self.calls[:-1]):
            grown = spots[f"F{place + 1} begins"].bytes - spots[f"F{place} ends"].bytes
            group = call.block.group
            around[group] = max(around.get(group, 0), grown)
        return sum(
            call.options[call.least].saved_bytes + around.get(call.block.group, 0)
            for call in self.unseen
        )

    def _test(self, numbers: Sequence[int]) -> StepResult:
        """Run a step, and compare it with plain PyTorch.

        Raises:
            SelfTestError: the bits differ.
        """
        known = self.tested.get(tuple(numbers))
        if known is not None:
            return known
        step = self._step_plan(numbers)
        root = _Root(self.bare, step)
        for _ in range(_MOST_TRIES):
            before = step.recordings
            most = TakingMost() if self.takes_by_values else contextlib.nullcontext()
            with self.parameters.kept(self.bare, self.sample), most:
                ours = run_step(root, root.bare, self.sample, keep="fingerprints")
            if step.recordings == before and not ours.released_bytes:
                break  # a recording takes memory of its own, and on a CPU the only meter
        wrong = [] if self.eager is None else differences(self.eager, ours)
        if wrong and self.settings.self_test:
            again = plain_step(self.bare, self.sample, self.parameters)
            noise = [] if again is None or self.eager is None else differences(self.eager, again)
            wrong = [what for what in wrong if what not in noise]
            if wrong:
                raise SelfTestError(
                    f"the planned blocks of {self.name} do not compute the bits of plain PyTorch: "
                    f"{', '.join(wrong[:3])} of {len(wrong)}. Please report it."
                )
        self.tested[tuple(numbers)], self.own = ours, step.own
        return ours


def _wanting_as(basic: BasicGraph, leaves: Sequence[Any]) -> list[Any]:
    """Return the same values, of which those want gradients that did in a recording."""
    wanting = {leaf for leaf, _ in basic.edges}
    return [
        leaf.detach().requires_grad_(name in wanting) if isinstance(leaf, Tensor) else leaf
        for leaf, name in zip(leaves, basic.inputs, strict=True)
    ]


class _Root(nn.Module):
    """A root that runs with a step plan, or with a `Meeting`."""

    def __init__(self, bare: nn.Module, step: StepPlan | Meeting) -> None:
        super().__init__()
        self.bare, self.step = bare, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.run(self.bare, args, kwargs)
