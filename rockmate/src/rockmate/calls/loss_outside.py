"""What the loss outside of a module took in a step, and plans that leave as much to it."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from rockmate.arguments import Call
from rockmate.calls.plan_store import Family, Key
from rockmate.calls.plans_of_module import PlansOfModule
from rockmate.calls.requester import planning
from rockmate.errors import InfeasibleBudgetError
from rockmate.files.plan_file import SeenLoss
from rockmate.networks import Planned, with_least_peak
from rockmate.schedules.simulate import simulate
from rockmate.whole_step.loss_seen import LossWatch
from rockmate.whole_step.memory import Memory

_log = logging.getLogger("rockmate")
_PLENTY = 4  # times what a loss may take: no loss is assumed to take more
_LITTLE = 100  # one part of so many of the memory is worth no new plan
_WHY = "what the loss outside of the module took"


class LossOutside(LossWatch):
    """Watches the loss of the first steps, if `memory=` was given, and replaces plans afterwards.

    What the loss took replaces the estimate. A plan that leaves too little room is made anew. So is
    a plan that recomputes although there is more room than was thought.
    """

    def __init__(self, module: PlansOfModule) -> None:
        whole = module.settings.whole_step
        super().__init__(is_awaited=whole is not None and whole.awaits_loss)
        self._module = module
        self._old: list[Family] = []  # planned before it was seen
        self.is_new = False
        self._refused: InfeasibleBudgetError | None = None
        self._cautious: tuple[Planned, Planned] | None = None  # a plan, and what runs instead

    @property
    def is_unseen(self) -> bool:
        """Whether there is a loss outside that may take more than a plan leaves to it."""
        call_bytes = self._module.call_bytes
        return self.is_awaited and call_bytes is not None and call_bytes.loss_bytes > 0

    def cautious(self, planned: Planned, call: Call) -> Planned:
        """Return what runs before the loss was seen: the plan, if it leaves plenty to the loss.

        Otherwise it is the plan of least peak, which leaves most to it.
        """
        if self._cautious is None or self._cautious[0] is not planned:
            _, memory = self._module.for_call(call)
            assert memory is not None
            is_plenty = leaves_plenty(planned.budget_bytes - planned.plan.peak_bytes, memory)
            self._cautious = planned, planned if is_plenty else with_least_peak(planned)
        return self._cautious[1]

    def follow(self, result: Any) -> None:
        super().follow(result)
        self._cautious = self._cautious if self.is_awaited else None

    def note(self, seen: SeenLoss) -> None:
        module = self._module
        _log.debug("the loss outside of the module took %s", seen)
        whole = replace(module.settings.whole_step, seen=seen)
        module.settings = replace(module.settings, whole_step=whole)
        self._old, self.is_awaited = [*module.plans.families.values()], False
        self._cautious = None
        self.is_new = bool(self._old)

    def renewed(self, key: Key, family: Family, call: Call) -> Family:
        """Return the plans for a call: new ones, if those from before are no longer the best."""
        old = [one for one in self._old if one is not family]
        was_old, self._old = len(old) < len(self._old), old
        self.is_new = bool(old)
        module, planned = self._module, family.variants[0]
        if not was_old or planned.is_plain:
            return family
        _, memory = module.for_call(call)
        assert memory is not None
        seen: SeenLoss = module.settings.whole_step.seen.at(memory.loss_bytes)
        more_bytes = memory.budget_bytes - (planned.accumulating or planned).budget_bytes
        # A plan for steps that begin with gradients counts where there are some, as now.
        used = (planned, module.for_gradients(planned))
        more_bytes_before = more_bytes + seen.taken_bytes
        is_over = any(_is_over(one, more_bytes_before, seen) for one in used)
        recomputes = planned.plan.overhead_ms > 0 and not module.settings.stands_alone
        is_better = recomputes and is_worth_a_plan(more_bytes, memory)
        if not is_over and not is_better:
            return family
        found = self._anew(key, family, call)
        if found is family and _is_over(family.variants[0], more_bytes_before, seen):
            assert self._refused is not None
            tell_no_room(module.model, self._refused)
        return found

    def _anew(self, key: Key, family: Family, call: Call) -> Family:
        """Return new plans, or if none fits, these with plans of least peak."""
        module = self._module
        with planning():
            own = next(k for k, one in module.plans.families.items() if one is family)
            before, variants = module.first, [*family.variants]
            module.plans.drop(lambda planned: any(planned is one for one in variants))
            if any(before is one for one in variants):
                module.first = None
            try:
                return module.plan_because(_WHY, key, call)
            except InfeasibleBudgetError as error:
                family.variants[:] = [module.least(one) for one in variants]
                module.plans.put(own, family)
                is_first = any(before is one for one in variants)
                module.first = family.variants[0] if is_first else before
                self._refused = error
                return family


def leaves_plenty(unused_bytes: int, memory: Memory) -> bool:
    """Whether a loss that is not seen yet has more than any takes, with what a plan leaves."""
    return unused_bytes >= (_PLENTY - 1) * memory.loss_bytes


def tell_no_room(model: nn.Module, error: InfeasibleBudgetError, stacklevel: int = 7) -> None:
    """Warn that no plan leaves what a loss takes."""
    warnings.warn(
        f"the loss outside of {type(model).__name__} takes more than was left to it, and steps "
        "take more than their memory. Let it be planned with the module (loss=), or give more "
        f"memory: {error}",
        RuntimeWarning,
        stacklevel=stacklevel,
    )


def is_worth_a_plan(more_bytes: int, memory: Memory) -> bool:
    """Whether so many more bytes for activations are worth a new plan."""
    return more_bytes * _LITTLE >= memory.asked_bytes


def _is_over(planned: Planned, more_bytes: int, seen: SeenLoss) -> bool:
    """Whether a step with this loss takes more than a plan's budget and `more_bytes` beside it."""
    problem, plan = planned.network.problem, planned.plan
    first = problem.nodes[problem.backward_order[0]]
    between_bytes = simulate(problem, plan.steps, plan.moves).between_bytes
    kept_bytes = between_bytes - first.grads_before_bytes  # which are among the most
    most_bytes = max(kept_bytes + seen.most_bytes, plan.peak_bytes + seen.kept_bytes)
    return most_bytes > planned.budget_bytes + more_bytes
