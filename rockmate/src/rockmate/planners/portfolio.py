"""Planning: several planners on one problem and one budget, each judged by the exact simulator.

keep everything → fits: done
budget below a cheap low-memory plan → smallest feasible budget → refuse, or have a fallback
small graphs: equal segments → search in windows → whole graph, hinted; done if near the bound
else: equal segments → chain at both grains → search in windows → bound
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rockmate.blocks import largest_block, pinned_candidates
from rockmate.chain import LARGE_BLOCK_NODES, SMALL_BLOCK_NODES, chain_model
from rockmate.errors import InfeasibleBudgetError, SolverError
from rockmate.options import BlockOption
from rockmate.plan import Plan, Trial, make_plan
from rockmate.planners.edit import prune
from rockmate.planners.minimum import floor_bytes, low_memory_plan, minimum_peak
from rockmate.planners.search import explore, improve
from rockmate.planners.simple import (
    best_segments,
    chen,
    no_recomputation,
    recompute_all,
)
from rockmate.problem import Problem
from rockmate.report import format_bytes
from rockmate.simulate import simulate
from rockmate.solvers import block_solver, solve_whole
from rockmate.solvers.bound import lower_bound
from rockmate.solvers.result import SolverResult
from rockmate.steps import Steps

logger = logging.getLogger(__name__)

_FEW_WINDOWS = 100  # nodes up to which two windows at a time would mostly be the same one
_HINT_WINDOWS = 16  # of each search that goes before solving the whole graph

Progress = Callable[[float, str], None]  # fraction done, what is being done

PLANNERS = (
    "auto",
    "none",
    "recompute_all",
    "chen",
    "segments",
    "rotor",
    "rockmate",
    "checkmate",
    "intervals",
    "search",
)


# Names and sizes of blocks, in nodes; 0: cut wherever possible. Neither of the first two always
# wins; the third takes long and wins where memory is tight.
GRAINS = (("half blocks", 0), ("blocks", SMALL_BLOCK_NODES), ("double blocks", 26))


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work planning may take; all limits but `seconds` are deterministic."""

    whole_nodes: int  # graphs of up to so many nodes are solved whole
    whole_limit: float  # deterministic seconds, about four to ten of the clock
    block_limit: float
    windows: int
    window_limit: float
    grains: int
    bound_cuts: int
    close_enough: float  # to the bound, relative to the step: what is left is not searched for
    small_enough: float  # gap under which chains, which suit small graphs less, are not tried
    seconds: float | None = None


EFFORTS = {
    "fast": Effort(55, 0.15, 0.05, 24, 0.02, 2, 1, 2e-3, 0.05),
    "balanced": Effort(80, 0.8, 0.2, 60, 0.05, 2, 2, 5e-4, 0.02),
    "best": Effort(120, 2.0, 0.5, 400, 0.1, 3, 3, 1e-4, 0.0),
}


def plan(
    problem: Problem,
    budget_bytes: int,
    *,
    effort: str | float = "balanced",
    planner: str = "auto",
    backend: str = "cp-sat",
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Return the fastest plan found whose exact peak is at most the budget.

    `effort` is "fast", "balanced" or "best", which are deterministic, or a number of seconds after
    which the search stops, which is not. `planner` chooses one planner instead of all; `backend`
    solves blocks and whole graphs: "cp-sat", "cbc", "highs" or "gurobi".

    Raises:
        InfeasibleBudgetError: no plan fits; `minimum_bytes` is the smallest budget accepted.
        SolverUnavailableError: the backend is not installed.
        SolverError: the chosen planner found nothing although the budget is feasible.
    """
    if planner not in PLANNERS:
        raise ValueError(f"planner {planner!r} is unknown; choose one of {', '.join(PLANNERS)}")
    return _Planning(problem, budget_bytes, effort_of(effort), backend, seed, progress).run(planner)


def effort_of(effort: str | float) -> Effort:
    """Return the limits of an effort: a name, or seconds."""
    if isinstance(effort, str):
        if effort not in EFFORTS:
            names = ", ".join(EFFORTS)
            raise ValueError(f"effort {effort!r} is unknown; choose {names}, or seconds")
        return EFFORTS[effort]
    if isinstance(effort, bool) or not effort > 0:
        raise ValueError(f"effort is {effort!r}; give a positive number of seconds or a name")
    return Effort(
        120, 2.0, 0.05 if effort < 15 else 0.2, 1_000_000, 0.05, 2, 2, 1e-4, 0.0, float(effort)
    )


@dataclass
class _Planning:
    """One run of the planners; keeps the best plan so far and what each of them reached."""

    problem: Problem
    budget: int
    effort: Effort
    backend: str
    seed: int
    progress: Progress | None
    best: Steps | None = None
    best_ms: float = float("inf")
    best_planner: str = ""
    tried: list[Trial] = field(default_factory=list)
    bound_ms: float | None = None  # under the overhead of every schedule
    begin: float = field(default_factory=time.perf_counter)

    def run(self, planner: str) -> Plan:
        problem, budget = self.problem, self.budget
        everything = no_recomputation(problem)
        if planner == "none" or simulate(problem, everything).peak_bytes <= budget:
            self._refuse_above(simulate(problem, everything).peak_bytes, planner == "none")
            return self._finish(everything, "none", 0.0)
        fallback = self._feasible()
        self._report(0.05, "simple plans")
        if planner in ("recompute_all", "chen"):
            steps = recompute_all(problem) if planner == "recompute_all" else chen(problem)
            self._refuse_above(simulate(problem, steps).peak_bytes, True)
            return self._finish(steps, planner, None)
        if planner == "auto":
            self._auto(fallback)
        else:
            self._single(planner, fallback)
        if self.best is None:
            raise SolverError(
                f"planner {planner!r} was asked for a plan within {format_bytes(budget)} and found "
                f"none, although the budget is feasible; use planner='auto'"
            )
        return self._finish(self.best, self.best_planner, self.bound_ms)

    # --- the budget -------------------------------------------------------------------------------

    def _feasible(self) -> Steps | None:
        """Refuse a budget below the smallest feasible one; return a low-memory plan."""
        steps, peak = low_memory_plan(self.problem)
        if self.budget >= peak:
            return steps
        self._report(0.02, "smallest feasible budget")
        begin = time.perf_counter()
        steps, peak = minimum_peak(self.problem, enough_bytes=self.budget)
        if self.budget < peak:
            raise infeasible(self.problem, self.budget, steps, peak)
        steps = prune(self.problem, steps, self.budget)
        self._consider("minimum peak", steps, begin)
        return steps

    def _refuse_above(self, peak: int, single: bool) -> None:
        if single and peak > self.budget:
            steps, least = minimum_peak(self.problem)
            if self.budget < least:
                raise infeasible(self.problem, self.budget, steps, least)
            raise InfeasibleBudgetError(
                f"this planner has a single plan, which needs {format_bytes(peak)}, and the budget "
                f"is {format_bytes(self.budget)}; use planner='auto' or raise the budget",
                asked_bytes=self.budget,
                minimum_bytes=peak,
            )

    # --- planners ---------------------------------------------------------------------------------

    def _auto(self, fallback: Steps | None) -> None:
        problem, effort = self.problem, self.effort
        self._try("segments", lambda: best_segments(problem, self.budget))
        if self.best is None and fallback is not None:
            self._consider("low memory", prune(problem, fallback, self.budget), time.perf_counter())
        small = len(problem.nodes) <= effort.whole_nodes
        if small:
            # What a short search finds is a good hint for the whole graph.
            self._search(explore, min(effort.windows, _HINT_WINDOWS), 0.1, 0.2)
            self._report(0.2, "whole graph")
            if self._whole() or self._is_within(effort.small_enough):
                return
        self._report(0.3, "blocks")
        if not self._stopped():
            self._chains()
        if not self._stopped():
            search = improve if len(problem.nodes) > _FEW_WINDOWS else explore
            self._search(search, effort.windows, 0.6, 0.95, seed=self.seed + 2)

    def _single(self, planner: str, fallback: Steps | None) -> None:
        problem = self.problem
        if planner == "segments":
            self._try("segments", lambda: best_segments(problem, self.budget))
        elif planner in ("rotor", "rockmate"):
            self._chains(classic=planner == "rotor", asked=True)
        elif planner in ("checkmate", "intervals"):
            if planner == "checkmate" and self.backend == "cp-sat":
                self.backend = "cbc"
            start = best_segments(problem, self.budget) or fallback
            self.best = None if start is None else prune(problem, start, self.budget)
            hint, self.best = self.best, None
            self._whole(hint)
        else:
            self._try("segments", lambda: best_segments(problem, self.budget))
            if self.best is None and fallback is not None:
                self._consider("low memory", fallback, time.perf_counter())
            self._search(improve, self.effort.windows, 0.6, 0.95)

    def _whole(self, hint: Steps | None = None) -> bool:
        """Solve the whole graph at once; say whether the answer is proven the best of its class."""
        begin = time.perf_counter()
        result = solve_whole(
            self.problem,
            self.budget,
            backend=self.backend,
            hint=hint or self.best,
            deterministic_limit=self.effort.whole_limit,
            wall_limit_s=self._seconds_left(),
            seed=self.seed,
        )
        note = "best of its class" if result.status == "optimal" else result.status
        self._consider(f"whole graph ({self.backend})", result.steps, begin, note)
        return result.status == "optimal"

    def _chains(self, *, classic: bool = False, asked: bool = False) -> None:
        problem = self.problem
        solver = block_solver(self.backend, self.effort.block_limit)
        cache: dict[object, tuple[BlockOption, ...]] = {}
        for pinned in [frozenset[int]()] if classic else self._pinned_sets():
            small = not asked and len(problem.nodes) <= self.effort.whole_nodes
            if small and largest_block(problem, pinned) > LARGE_BLOCK_NODES:
                self.tried.append(Trial("chain", 0.0, note="blocks too large"))
                continue
            for grain, max_nodes in GRAINS[:1] if classic else GRAINS[: self.effort.grains]:
                if self._stopped():
                    return
                begin = time.perf_counter()
                name = "rotor" if classic else f"chain of {grain}"
                name += f", {len(pinned)} pinned" if pinned else ""
                model = chain_model(
                    problem,
                    _no_options if classic else solver,
                    merged=max_nodes > 0,
                    pinned=pinned,
                    cache=None if classic else cache,
                    max_nodes=max_nodes,
                )
                if model is None:
                    self.tried.append(Trial(name, time.perf_counter() - begin, note="no cut"))
                    continue
                steps = model.plan(self.budget, pruned=1 if classic else 4)
                self._consider(name, steps, begin)

    def _pinned_sets(self) -> list[frozenset[int]]:
        """Sets of storages to keep all the time: none, or the few that make it a chain at all.

        Where next to nothing is pinned, and there are far more cuts for it, only that is worth it.
        """
        sets = pinned_candidates(self.problem, self.budget // 4)[:3]
        for pinned in reversed(sets[1:]):
            if sum(self.problem.sizes[i] for i in pinned) <= self.budget // 10:
                return [pinned]
        return sets

    def _search(
        self,
        search: Callable[..., Steps],
        windows: int,
        begin_at: float,
        end_at: float,
        seed: int | None = None,
    ) -> None:
        """Search in windows; `begin_at` and `end_at` are fractions of progress."""
        if self.best is None or self._is_within(self.effort.close_enough):
            return
        begin = time.perf_counter()
        done = 0

        def stop() -> bool:
            nonlocal done
            done += 1
            part = min(1.0, done / windows)
            self._report(begin_at + (end_at - begin_at) * part, "search")
            return self._stopped()

        steps = search(
            self.problem,
            self.best,
            self.budget,
            windows=windows,
            window_limit=self.effort.window_limit,
            seed=self.seed if seed is None else seed,
            stop=stop,
        )
        self._consider("search in windows", steps, begin)

    def _is_within(self, gap: float) -> bool:
        """Whether there is a plan, and one as near to the bound, relative to the step."""
        if self.bound_ms is None:
            self.bound_ms = lower_bound(self.problem, self.budget, cuts=self.effort.bound_cuts)
        base = self.problem.base_time_ms
        least = base + (self.bound_ms or 0.0)
        return base + self.best_ms <= least * (1 + gap)

    # --- bookkeeping ------------------------------------------------------------------------------

    def _try(self, name: str, planner: Callable[[], Steps | None]) -> None:
        begin = time.perf_counter()
        self._consider(name, planner(), begin)

    def _consider(self, name: str, steps: Steps | None, begin: float, note: str = "") -> None:
        """Judge the steps of a planner, note what they reach, keep them if they are the best."""
        seconds = time.perf_counter() - begin
        if steps is None:
            self.tried.append(Trial(name, seconds, note=note or "found nothing"))
            return
        timeline = simulate(self.problem, steps)
        self.tried.append(Trial(name, seconds, timeline.overhead_ms, timeline.peak_bytes, note))
        logger.debug("%s: %.3f ms in %.2f s", name, timeline.overhead_ms, seconds)
        if timeline.peak_bytes <= self.budget and timeline.overhead_ms < self.best_ms:
            self.best, self.best_ms, self.best_planner = steps, timeline.overhead_ms, name

    def _finish(self, steps: Steps, planner: str, overhead_bound_ms: float | None) -> Plan:
        problem = self.problem
        timeline = simulate(problem, steps)
        self._report(0.95, "bound")
        if overhead_bound_ms is None and timeline.overhead_ms > 0:
            overhead_bound_ms = lower_bound(problem, self.budget, cuts=self.effort.bound_cuts)
        base = problem.base_time_ms
        bound = None if overhead_bound_ms is None else base + overhead_bound_ms
        if timeline.overhead_ms == 0:
            bound = base
        if bound is not None:
            bound = min(bound, base + timeline.overhead_ms)  # rounding of the linear program
        proven = bound is not None and base + timeline.overhead_ms <= bound * (1 + 1e-9)
        self._report(1.0, "done")
        return make_plan(
            problem,
            steps,
            self.budget,
            planner,
            tried=tuple(self.tried),
            bound_ms=bound,
            status="optimal" if proven else "feasible",
            plan_seconds=time.perf_counter() - self.begin,
        )

    def _report(self, fraction: float, text: str) -> None:
        if self.progress is not None:
            self.progress(fraction, text)

    def _seconds_left(self) -> float | None:
        if self.effort.seconds is None:
            return None
        return max(0.0, self.begin + self.effort.seconds - time.perf_counter())

    def _stopped(self) -> bool:
        left = self._seconds_left()
        return left is not None and left <= 0


def infeasible(problem: Problem, asked: int, steps: Steps, minimum: int) -> InfeasibleBudgetError:
    """Return the error for a budget below the smallest feasible one, naming what sets it."""
    timeline = simulate(problem, steps)
    kind, k = steps[timeline.peak_step]
    node = problem.nodes[k]
    where = node.module_path or "the top module"
    what = "backward" if kind == "B" else "forward"
    why = "its own inputs, results and workspace take all of it"
    if minimum > floor_bytes(problem):
        why = "beside what must stay alive there"
    return InfeasibleBudgetError(
        f"no plan of {len(problem.nodes)} nodes was found within {format_bytes(asked)} "
        f"({asked} bytes): the {what} of {node.op or node.name} in {where} needs "
        f"{format_bytes(minimum)} ({minimum} bytes), {why}. Raise the budget to at least "
        f"{minimum} bytes, or reduce the batch size",
        asked_bytes=asked,
        minimum_bytes=minimum,
    )


def _no_options(problem: Problem, budget_bytes: int, hint: Steps) -> SolverResult:
    """The solver of classic rotor: a block is kept whole or not at all."""
    return SolverResult("infeasible")
