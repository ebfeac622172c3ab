"""The loss outside of a model planned by blocks: what a step shows of it, and what follows then.

Until it is seen, blocks run the options that leave it most. Once it was seen, options are chosen
again, among those that were tested and measured before. Nothing is run for that: the model may be
in an engine by then, which counts its forwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rkgb.torch_api import is_transforming
from rockmate.arguments import Call
from rockmate.blockwise.planning import BlockPlanner
from rockmate.blockwise.report import ChosenBlocks
from rockmate.calls.loss_outside import leaves_plenty, tell_no_room
from rockmate.errors import InfeasibleBudgetError
from rockmate.files.plan_file import SeenLoss
from rockmate.options.module_choice import StepMemory, smallest_budget
from rockmate.runtime.plain import is_plain
from rockmate.whole_step.loss_seen import TRIES, LossWatch
from rockmate.whole_step.memory import Memory
from rockmate.whole_step.outputs import CallBytes
from rockmate.whole_step.whole_step import WholeStep

_WHY_CLOSED = "it looks at memory"
_TOO_LITTLE = 1  # a budget whose refusal names the smallest one


@dataclass(frozen=True)
class Within:
    """The memory of whole steps, for the most demanding of some calls."""

    whole: WholeStep
    call: CallBytes
    memory: Memory
    in_flight: int  # forwards before a backward

    @classmethod
    def of(
        cls, whole: WholeStep, model: nn.Module, calls: Sequence[Call], in_flight: int
    ) -> Within:
        """Return it for calls of a model."""
        found = [whole.call_bytes(model, *call).times(in_flight) for call in calls]
        each = [cls(whole, call, whole.memory(model, call), in_flight) for call in found]
        return min(each, key=lambda one: (one.memory.holds(), one.memory.budget_bytes))

    @property
    def awaits_loss(self) -> bool:
        """Whether a loss outside will be seen; outputs of a pipeline's stage are no loss's."""
        return self.in_flight == 1 and self.whole.awaits_loss

    @property
    def budget_bytes(self) -> int:
        """What it leaves to forward and backward."""
        return self.memory.budget_bytes if self.memory.holds() else _TOO_LITTLE

    def after(self, seen: SeenLoss) -> Within:
        """Return the same memory with what the loss took.

        Nothing else is counted anew: amid a step an engine may have gathered parameters.
        """
        taken_bytes = seen.at(self.call.loss_bytes).taken_bytes
        whole = replace(self.whole, seen=seen)
        return replace(self, whole=whole, memory=self.memory.with_loss(taken_bytes))


class LossOfBlocks(LossWatch):
    """Hooks of a model for its first steps.

    The processes of a team exchange what they saw when the next step begins, as all are there then.
    """

    def __init__(
        self,
        within: Within,
        planner: BlockPlanner,
        chosen: ChosenBlocks,
        show: Callable[[ChosenBlocks, Within], None],
    ) -> None:
        super().__init__(is_awaited=True)
        self._within, self._planner, self._chosen = within, planner, chosen
        self._show, self._steps = show, 0
        self._seen: Within | None = None
        model = planner.model
        self._handles = (
            model.register_forward_pre_hook(StepHook(self._before, self.take_off)),
            model.register_forward_hook(StepHook(self._after, self.take_off)),
        )
        if not leaves_plenty(chosen.budget_bytes - chosen.choice.peak_bytes, within.memory):
            self._run_what_leaves_most()

    def note(self, seen: SeenLoss) -> None:
        self._seen = self._within.after(seen)

    def take_off(self) -> None:
        """Watch no more."""
        self.close()
        for handle in self._handles:
            handle.remove()

    def _run_what_leaves_most(self) -> None:
        """Run the choice of least peak with what a loss may take."""
        beside = _beside(self._chosen, self._within.memory.loss_bytes, 0)
        most = self._planner.choose_again(self._chosen, smallest_budget(beside), beside)
        assert most is not None
        self._planner.blocks.install(most.forwards)

    def _before(self, model: nn.Module, *_: Any) -> None:
        self.close()
        if not self._steps or not _is_step(model):
            return
        found = self._planner.team.gather(self._facts())
        facts = [row for row in found if row is not None]
        if len(facts) == len(found):
            budgets, taken, kept = zip(*facts, strict=True)
            self._choose(min(budgets), max(taken), max(kept))
        elif self._steps >= TRIES:
            self._planner.blocks.install(self._chosen.forwards)
        else:
            return
        self.take_off()

    def _facts(self) -> tuple[int, int, int] | None:
        """Return the budget beside the loss, and what the loss took in all and keeps."""
        if self._seen is None:
            return None
        seen, loss_bytes = self._seen.whole.seen, self._seen.call.loss_bytes
        assert seen is not None
        here = seen.at(loss_bytes)
        return self._seen.memory.budget_bytes, here.taken_bytes, here.kept_bytes

    def _choose(self, budget_bytes: int, taken_bytes: int, kept_bytes: int) -> None:
        """Choose options for what is left beside the loss; if none fit, only while it is there."""
        chosen, again = self._chosen, self._planner.choose_again
        assert chosen.tested is not None
        assert self._seen is not None
        beside = _beside(chosen, taken_bytes, kept_bytes)
        all_bytes = budget_bytes + taken_bytes
        found = again(chosen, budget_bytes, chosen.tested) or again(chosen, all_bytes, beside)
        if found is not None:
            self._planner.blocks.install(found.forwards)
            self._show(found, self._seen)
            return
        more_bytes = smallest_budget(beside) - all_bytes
        least_bytes = budget_bytes + more_bytes
        short = InfeasibleBudgetError("", asked_bytes=budget_bytes, minimum_bytes=least_bytes)
        tell_no_room(self._planner.model, self._seen.memory.refusal(short), 6)

    def _after(self, model: nn.Module, _: Any, result: Any) -> None:
        if _is_step(model):
            self._steps += 1
            self.follow(result)


def _beside(chosen: ChosenBlocks, turn_bytes: int, kept_bytes: int) -> StepMemory:
    """Return the tested step with the bytes of a loss added, at the turn and in the backward."""
    tested = chosen.tested
    assert tested is not None
    calls = (
        replace(
            call,
            backward_base_bytes=call.backward_base_bytes + kept_bytes,
            after_backward_bytes=call.after_backward_bytes + kept_bytes,
        )
        for call in tested.calls
    )
    return replace(tested, calls=tuple(calls), turn_bytes=tested.turn_bytes + turn_bytes)


@dataclass(frozen=True, eq=False)
class StepHook:
    """Calls a method of a watch; copies and files of the model have a hook that does nothing."""

    call: Callable[..., None]
    stop: Callable[[], None]  # watches no more

    @property
    def untraced(self) -> Callable[..., None]:
        """The method, closed to torch.compile, whose import (a second) it does not cause."""
        if "torch._dynamo" not in sys.modules:
            return self.call
        closed: Callable[..., None] = torch.compiler.disable(self.call, reason=_WHY_CLOSED)
        return closed

    def __call__(self, *args: Any) -> None:
        self.untraced(*args)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _pass


def _pass(*_: Any) -> None:
    pass


def _is_step(model: nn.Module) -> bool:
    return torch.is_grad_enabled() and model.training and not is_plain() and not is_transforming()
