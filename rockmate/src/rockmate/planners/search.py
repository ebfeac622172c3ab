"""One run of the planners: the question, the best plan so far, and the result of each planner."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from rockmate.options.options import KnownBlocks
from rockmate.planners.effort import Effort
from rockmate.problems.problem import Problem
from rockmate.schedules.plan import Plan, Trial, make_plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps
from rockmate.solvers.bound import lower_bound

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[float, str], None]  # fraction done, what is being done


def _processor_seconds() -> float:
    """Return the processor time of this process and of the solvers that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass
class Search:
    """What planners read, and where they leave their plans; the exact simulator checks each."""

    problem: Problem
    budget_bytes: int
    effort: Effort
    backend: str
    seed: int
    planner: str  # the user's choice
    progress: Progress | None
    known: KnownBlocks = field(default_factory=KnownBlocks)  # gets the options of blocks
    fallback: Steps | None = None  # a plan of little memory
    best: Steps | None = None
    best_ms: float = float("inf")
    best_planner: str = ""
    tried: list[Trial] = field(default_factory=list)
    bound_ms: float | None = None  # lower bound on the overhead of every schedule
    bound_cuts: int = -1  # with which the bound was computed
    begin: float = field(default_factory=time.perf_counter)
    begin_cpu: float = field(default_factory=lambda: _processor_seconds())
    share: tuple[float, float] = (0.0, 1.0)  # of all work: where this part begins and ends

    # --- plans ------------------------------------------------------------------------------------

    def attempt(self, name: str, make: Callable[[], Steps | None]) -> None:
        """Call `make` and consider its steps under `name`."""
        begin = time.perf_counter()
        self.consider(name, make(), begin)

    def consider(self, name: str, steps: Steps | None, begin: float, note: str = "") -> None:
        """Simulate the steps of a planner, note the result, and keep them if they are the best."""
        seconds = time.perf_counter() - begin
        if steps is None:
            self.tried.append(Trial(name, seconds, note=note or "found nothing"))
            return
        timeline = simulate(self.problem, steps)
        self.tried.append(Trial(name, seconds, timeline.overhead_ms, timeline.peak_bytes, note))
        logger.debug("%s: %.3f ms in %.2f s", name, timeline.overhead_ms, seconds)
        if timeline.peak_bytes <= self.budget_bytes and timeline.overhead_ms < self.best_ms:
            self.best, self.best_ms, self.best_planner = steps, timeline.overhead_ms, name

    def take(self, steps: Steps, planner: str) -> None:
        """Make these steps the result, even if a better one was found before."""
        self.best, self.best_planner = steps, planner
        self.best_ms = simulate(self.problem, steps).overhead_ms

    def forget(self) -> None:
        """Drop the best plan, so that the next one is taken in any case."""
        self.best, self.best_ms, self.best_planner = None, float("inf"), ""

    def is_within(self, gap: float) -> bool:
        """Return whether there is a plan with at most this gap, as a fraction of the step time."""
        base = self.problem.base_time_ms

        def near() -> bool:
            return base + self.best_ms <= (base + (self.bound_ms or 0.0)) * (1 + gap)

        if near():
            return True
        self._raise_bound()
        return near()

    def finish(self, *, bounded: bool = True) -> Plan:
        """Return the best steps as a plan, with a lower bound on the time of every plan.

        Without `bounded` there is a bound only if it costs nothing.
        """
        assert self.best is not None
        problem = self.problem
        timeline = simulate(problem, self.best)
        self.share = (0.0, 1.0)
        self.report(0.95, "bound")
        if bounded and self.bound_ms is None and timeline.overhead_ms > 0:
            self._raise_bound()
        base = problem.base_time_ms
        bound = None if self.bound_ms is None else base + self.bound_ms
        if timeline.overhead_ms == 0:
            bound = base
        if bound is not None:
            bound = min(bound, base + timeline.overhead_ms)  # the linear program rounds
        proven = bound is not None and base + timeline.overhead_ms <= bound * (1 + 1e-9)
        return make_plan(
            problem,
            self.best,
            self.budget_bytes,
            self.best_planner,
            tried=tuple(self.tried),
            bound_ms=bound,
            status="optimal" if proven else "feasible",
            plan_seconds=time.perf_counter() - self.begin,
        )

    def _raise_bound(self) -> None:
        """Compute the bound that this effort affords, unless that has been done."""
        if self.bound_cuts < self.effort.bound_cuts:
            self.bound_cuts = self.effort.bound_cuts
            found = lower_bound(self.problem, self.budget_bytes, cuts=self.bound_cuts)
            self.bound_ms = max(self.bound_ms or 0.0, found or 0.0)

    # --- time -------------------------------------------------------------------------------------

    def report(self, fraction: float, text: str) -> None:
        """Report progress to the user."""
        if self.progress is not None:
            begin, end = self.share
            self.progress(begin + (end - begin) * fraction, text)

    def seconds_left(self) -> float | None:
        """Return the processor's seconds until the search must stop; None: only work is limited."""
        if self.effort.seconds is None:
            return None
        return max(0.0, self.begin_cpu + self.effort.seconds - _processor_seconds())

    def is_over(self) -> bool:
        """Whether the effort's seconds have passed."""
        left = self.seconds_left()
        return left is not None and left <= 0
