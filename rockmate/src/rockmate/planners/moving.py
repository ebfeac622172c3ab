"""Keep, recompute or move: plans in which some storages are elsewhere for a while.

Bringing a storage in is a recomputation that reads nothing and takes no time. So the planners need
no new kind of decision: for the storages that the link can carry, the problem gets one more node
each (`Arrivals`), and they search as always.

lower bound with the link's rows -> which storages to move      (`storages_to_move`)
steps without moves -> steps in which these arrive              (`Arrivals.hint`, prune, windows)
steps -> when each copy starts and ends, as memory allows       (`moves_for`)
simulator with three clocks -> time and peak of the plan
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from rockmate.errors import InfeasibleBudgetError
from rockmate.planners.arrivals import Arrivals
from rockmate.planners.copy_times import begins_of, moves_for
from rockmate.planners.effort import Effort
from rockmate.planners.smallest_budget import minimum_peak
from rockmate.planners.squeeze import squeeze
from rockmate.planners.windows import FEW_NODES, suited
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import Plan, Trial, make_plan
from rockmate.schedules.prune import prune
from rockmate.schedules.report import exact_bytes
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps
from rockmate.solvers.bound import lower_bound, storages_to_move
from rockmate.solvers.least_budget import QUICK_WORK, least_budget
from rockmate.solvers.result import stages_of

PlanWithin: TypeAlias = Callable[[Problem, int], Plan]  # plans without moves

_TRIES = 2000  # of sets, times the nodes, on a small graph
_STARTS = 5  # plans from which other sets are tried there
_WINDOWS_PART = 4  # of the windows: each takes longer than without moves, and seldom helps
_LITTLE = 1e-3  # extra time, as a part of the step, below which the search ends


def plan_with_moves(
    problem: Problem, budget_bytes: int, plan: PlanWithin, effort: Effort, seed: int = 0
) -> Plan:
    """Return the fastest plan found within the budget, with or without moves.

    Raises:
        InfeasibleBudgetError: no plan fits.
    """
    begin = time.perf_counter()
    assert problem.link is not None
    bare = dataclasses.replace(problem, link=None)
    everything = no_recomputation(problem)
    if simulate(bare, everything).peak_bytes <= budget_bytes:
        return plan(bare, budget_bytes)
    found = _Found(problem, budget_bytes)
    sets = list(_sets(problem, budget_bytes))
    for arrivals in sets:
        found.consider("moving all", arrivals, arrivals.hint(everything))
    if not found.is_free:
        try:
            base = plan(bare, budget_bytes)
        except InfeasibleBudgetError as error:
            _least_memory(found, error)
        else:
            found.take(base)
        assert found.best is not None
        _search(found, found.best.steps, sets, effort, seed)
    assert found.best is not None
    return found.finish(time.perf_counter() - begin)


def _least_memory(found: _Found, error: InfeasibleBudgetError) -> None:
    """Consider the plan of least memory in which all that may be moved is moved.

    Raises:
        InfeasibleBudgetError: it does not fit either; the error names the smaller minimum.
    """
    problem, chosen = found.problem, _movable(found.problem)
    arrivals = Arrivals(problem, chosen, takes_time=False)
    steps, peak_bytes = minimum_peak(arrivals.problem, enough_bytes=found.budget_bytes)
    if peak_bytes <= found.budget_bytes:
        found.consider("least memory, moving", arrivals, steps)
    if found.best is not None:
        return
    own, places = arrivals.split(steps)
    is_lower = (
        peak_bytes < error.minimum_bytes
        and next(moves_for(problem, own, places, peak_bytes), None) is not None
    )
    minimum_bytes = peak_bytes if is_lower else error.minimum_bytes
    helps = "with offload" if is_lower else "with or without offload"
    raise InfeasibleBudgetError(
        f"the budget must be at least {exact_bytes(minimum_bytes)} {helps}, and is "
        f"{found.budget_bytes} bytes. Without offload, {error}",
        asked_bytes=found.budget_bytes,
        minimum_bytes=minimum_bytes,
        bound_bytes=least_budget(problem, minimum_bytes, work=QUICK_WORK),
    ) from None


def _movable(problem: Problem) -> list[int]:
    """Return what may be moved, the largest storages if not all of them fit there."""
    link = problem.link
    assert link is not None
    chosen = [i for i, storage in enumerate(problem.storages) if storage.is_movable]
    if link.host_bytes is not None:
        chosen.sort(key=lambda i: -problem.sizes[i])
        taken = itertools.accumulate(link.host_taken(problem.sizes[i]) for i in chosen)
        chosen = [i for i, total in zip(chosen, taken, strict=True) if total <= link.host_bytes]
    return sorted(chosen)


def _search(
    found: _Found, steps: Steps, sets: Sequence[Arrivals], effort: Effort, seed: int
) -> None:
    """Consider plans from these steps: without search for each set, then in windows."""
    is_small = len(found.problem.nodes) <= FEW_NODES
    if is_small:
        for chosen, takes_time in itertools.product(((), _movable(found.problem)), (True, False)):
            sets = [*sets, Arrivals(found.problem, chosen, takes_time=takes_time)]
    starts = [start for arrivals in sets if (start := _start(found, arrivals, steps))]
    if not starts:
        return
    starts.sort(key=lambda start: start.time_ms)
    best = starts[0]
    if is_small:
        others = (_other_sets(found, start, steps) for start in starts[:_STARTS])
        best = min((best, *others), key=lambda start: start.time_ms)
    if found.is_free:
        return
    better = suited(found.problem)(
        best.arrivals.problem,
        best.steps,
        found.budget_bytes,
        windows=effort.windows // _WINDOWS_PART,
        window_limit=effort.window_limit,
        seed=seed,
        stop=lambda: found.is_over(effort),
    )
    found.consider("moving, search in windows", best.arrivals, better)


class _Start(NamedTuple):
    """A plan without search for a set of storages."""

    time_ms: float
    arrivals: Arrivals
    steps: Steps  # in which they arrive


def _start(found: _Found, arrivals: Arrivals, steps: Steps) -> _Start | None:
    """Return a plan without search: what stays is as in these steps, or made again if need be."""
    problem, budget_bytes = arrivals.problem, found.budget_bytes
    pruned = prune(problem, arrivals.hint(steps), budget_bytes)
    if simulate(problem, pruned).peak_bytes > budget_bytes:
        again = squeeze(problem, budget_bytes, budget_bytes)
        if again is None:
            return None
        pruned = prune(problem, again, budget_bytes)
    time_ms = found.consider("moving", arrivals, pruned)
    return None if time_ms is None else _Start(time_ms, arrivals, pruned)


def _other_sets(found: _Found, best: _Start, steps: Steps) -> _Start:
    """Move one or two storages more, or less, or one instead of another, as long as that helps.

    On a small graph the linear program says little about which storages to move. Waiting for a copy
    may take less time than recomputation, so every set is tried that fits on the other side.
    """
    problem, link = found.problem, found.problem.link
    assert link is not None
    movable = [i for i, storage in enumerate(problem.storages) if storage.is_movable]
    changes = [{i} for i in movable] + [set(pair) for pair in itertools.combinations(movable, 2)]
    tried: set[frozenset[int]] = set()
    idle = 0
    for change in itertools.cycle(changes):
        if idle == len(changes) or len(tried) * len(problem.nodes) > _TRIES or found.is_free:
            break
        idle += 1
        chosen = frozenset(best.arrivals.chosen) ^ change
        if chosen in tried or not link.holds(problem.sizes[i] for i in chosen):
            continue
        tried.add(chosen)
        for takes_time in (True, False):
            arrivals = Arrivals(problem, sorted(chosen), takes_time=takes_time)
            start = _start(found, arrivals, steps)
            if start is not None and start.time_ms < best.time_ms:
                best, idle = start, 0
    return best


class _Found:
    """The best plan so far, and what was tried."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.best: Plan | None = None
        self.tried: list[Trial] = []
        self._begin = time.process_time()

    def is_over(self, effort: Effort) -> bool:
        """Whether the effort's seconds of processor time have passed."""
        limit = effort.seconds
        return limit is not None and time.process_time() - self._begin > limit

    @property
    def is_free(self) -> bool:
        """Whether a plan takes hardly more time than a plain step."""
        return self.best is not None and self.best.overhead < _LITTLE

    def take(self, plan: Plan) -> None:
        """Consider a plan without moves."""
        self.tried += plan.tried
        if self.best is None or plan.overhead_ms < self.best.overhead_ms:
            self.best = plan

    def consider(self, planner: str, arrivals: Arrivals, steps: Steps) -> float | None:
        """Consider steps with arrivals; return their overhead in ms, None if they do not fit."""
        begin = time.perf_counter()
        own, places = arrivals.split(steps)
        plan: Plan | None = None
        for moves in moves_for(self.problem, own, places, self.budget_bytes):
            made = make_plan(self.problem, own, self.budget_bytes, planner, moves)
            plan = made if plan is None or made.overhead_ms < plan.overhead_ms else plan
            if not plan.stall_ms:
                break
        seconds = time.perf_counter() - begin
        if plan is None:
            return None
        self.tried.append(Trial(planner, seconds, plan.overhead_ms, plan.peak_bytes))
        if self.best is None or plan.overhead_ms < self.best.overhead_ms:
            self.best = plan
        return plan.overhead_ms

    def finish(self, seconds: float) -> Plan:
        """Return the best plan, with a bound for plans that may move."""
        assert self.best is not None
        bound = lower_bound(self.problem, self.budget_bytes, cuts=2) or 0.0
        bound_ms = min(self.problem.base_time_ms + bound, self.best.time_ms)
        return dataclasses.replace(
            self.best,
            tried=_best_of_each(self.tried),
            bound_ms=bound_ms,
            status="optimal" if self.best.time_ms <= bound_ms * (1 + 1e-9) else "feasible",
            plan_seconds=seconds,
        )


def _best_of_each(tried: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the best result of each planner, in the order in which they were tried."""
    found: dict[str, Trial] = {}
    for one in tried:
        known = found.get(one.planner)
        if known is None:
            found[one.planner] = one
            continue
        seconds = known.seconds + one.seconds
        both = [t for t in (known, one) if t.overhead_ms is not None]
        best = min(both, key=lambda t: t.overhead_ms or 0.0, default=known)
        found[one.planner] = dataclasses.replace(best, seconds=seconds)
    return tuple(found.values())


def _sets(problem: Problem, budget_bytes: int) -> list[Arrivals]:
    """Return different sets of storages to move, as problems in which they arrive."""
    sets = storages_to_move(problem, budget_bytes, _carrier(problem))
    return [
        Arrivals(problem, chosen, takes_time=takes_time)
        for chosen in dict.fromkeys(sets)
        for takes_time in (True, False)
        if chosen
    ]


def _carrier(problem: Problem) -> Callable[[Sequence[int]], bool]:
    """Return whether the link can carry some storages in time.

    What goes out after some node fits into the forward from there on; what comes in up to some
    stage fits into the backward up to there.
    """
    link = problem.link
    assert link is not None
    nodes, stage = problem.nodes, stages_of(problem)
    # Of the forward from each node on, and of the backward up to each stage.
    rest = begins_of(node.fwd_time_ms for node in reversed(nodes))[::-1]
    done = begins_of(nodes[k].bwd_time_ms for k in problem.backward_order)
    first = {
        i: min(stage[u] for u in storage.bwd_users)
        for i, storage in enumerate(problem.storages)
        if storage.bwd_users
    }

    def fits(candidates: Sequence[int]) -> bool:
        if not link.holds(problem.sizes[i] for i in candidates):
            return False
        out_ms = in_ms = 0.0
        for index in sorted(candidates, key=lambda i: -problem.storages[i].producer):
            out_ms += link.out_ms(problem.sizes[index])
            if out_ms > rest[problem.storages[index].producer]:
                return False
        for index in sorted(candidates, key=lambda i: first[i]):
            in_ms += link.in_ms(problem.sizes[index])
            if in_ms > done[first[index] - 1]:
                return False
        return not link.is_shared or out_ms + in_ms <= problem.base_time_ms

    return fits
