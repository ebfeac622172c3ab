"""Large-neighbourhood search: free a part of the current plan, and let CP-SAT improve it.

A window frees some nodes in some stages. The rest of the plan is a fixed background, so a window of
a network of any length is a small program. A seeded generator draws the windows: one group of
nodes, or two, between which memory can be exchanged. A group is neighbours in the node order, or in
the graph: nodes that make or read the same storages, whatever their places in the order. Windows
around recomputed nodes were tried and are no better. Two windows of the same plan are solved at a
time; if both help, their changes are combined.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rockmate.errors import InvalidPlanError
from rockmate.parallel import map_in_parallel
from rockmate.problems.problem import Problem
from rockmate.schedules.prune import prune
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps
from rockmate.solvers.intervals.solve import Window, solve_intervals
from rockmate.solvers.result import recomputed_by_stage, stages_of, steps_of_stages

_SIZES = (16, 24, 36)  # nodes of a window that CP-SAT solves in a fraction of a second
_MOST_USERS = 8  # a storage with more readers makes no neighbours
_ONE_GROUP = 0.4  # share of windows with one group of nodes
_IN_GRAPH = 0.5  # share of groups that are neighbours in the graph
_FIRST_WINDOWS = 12  # the search ends if these gain almost nothing, as on chains of equal blocks
_LEAST_GAIN = 1e-4  # of the step
FEW_NODES = 100  # up to here two windows at a time would mostly be equal
_AT_ONCE = 2  # windows solved at the same time; fixed, so that every machine finds the same plan


def suited(problem: Problem) -> Callable[..., Steps]:
    """Return the search for a graph of this size: `explore`, or `improve` for a larger one."""
    return explore if len(problem.nodes) <= FEW_NODES else improve


def in_node_order(problem: Problem, steps: Steps) -> Steps:
    """Return the steps with the recomputations of each stage in node order, each at most once.

    Windows need this form. Its peak may differ from the original's.
    """
    return steps_of_stages(problem, recomputed_by_stage(problem, steps))


def improve(
    problem: Problem,
    steps: Steps,
    budget_bytes: int,
    *,
    windows: int,
    window_limit: float = 0.1,
    at_once: int = _AT_ONCE,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Steps:
    """Return steps that are at least as fast, after trying up to `windows` windows.

    `window_limit` is in deterministic seconds, about four of the clock. The result is deterministic
    if `stop` is. `at_once` windows are solved at the same time, from the same plan. On graphs much
    larger than a window this is as good as one after the other; on small graphs it is worse. Steps
    that do not fit the budget in node order are returned unchanged.
    """
    current = prune(problem, in_node_order(problem, steps), budget_bytes)
    timeline = simulate(problem, current)
    best = simulate(problem, steps)
    if timeline.peak_bytes > budget_bytes:
        return steps
    cost = timeline.overhead_ms
    draw = random.Random(seed)

    def solve(window: Window) -> Steps | None:
        result = solve_intervals(
            problem,
            budget_bytes,
            window=window,
            max_runs=2,
            deterministic_limit=window_limit,
            seed=seed,
        )
        return None if result.steps is None else prune(problem, result.steps, budget_bytes)

    near = _neighbours(problem)
    hoped = cost - _LEAST_GAIN * problem.base_time_ms
    for done in range(0, windows, at_once):
        if stop() or cost <= 0 or (done >= _FIRST_WINDOWS and cost > hoped):
            break
        drawn = [
            window
            for _ in range(at_once)
            if (window := _window(problem, current, _draw_nodes(near, draw)))
        ]
        answers = zip(drawn, map_in_parallel(solve, drawn), strict=True)
        found = [
            (window, answer)
            for window, answer in answers
            if answer is not None and _overhead_ms(problem, answer, budget_bytes) < cost
        ]
        candidates = [answer for _, answer in found]
        if len(found) > 1:
            candidates += _joined(problem, found, budget_bytes)
        for candidate in candidates:
            reached = _overhead_ms(problem, candidate, budget_bytes)
            if reached < cost:
                current, cost = candidate, reached
    return current if cost <= best.overhead_ms else steps


def explore(problem: Problem, steps: Steps, budget_bytes: int, *, seed: int, **how: Any) -> Steps:
    """Return the better result of two parallel searches; for small graphs.

    `how` they search is as in `improve`.
    """

    def search(own_seed: int) -> Steps:
        return improve(problem, steps, budget_bytes, at_once=1, seed=own_seed, **how)

    found = map_in_parallel(search, (seed, seed + 1))
    return min(found, key=lambda steps: simulate(problem, steps).overhead_ms)


def _overhead_ms(problem: Problem, steps: Steps, budget_bytes: int) -> float:
    timeline = simulate(problem, steps)
    return timeline.overhead_ms if timeline.peak_bytes <= budget_bytes else math.inf


def _joined(
    problem: Problem, answers: Sequence[tuple[Window, Steps]], budget_bytes: int
) -> list[Steps]:
    """Return the first answer with the other answers' changes to the nodes of their windows.

    Empty if the combination is no plan: one answer may read what the other no longer recomputes.
    """
    joined = recomputed_by_stage(problem, answers[0][1])
    for window, other in answers[1:]:
        theirs = recomputed_by_stage(problem, other)
        joined = {
            stage: [
                *(k for k in joined.get(stage, ()) if k not in window.nodes),
                *(k for k in theirs.get(stage, ()) if k in window.nodes),
            ]
            for stage in {**joined, **theirs}
        }
    try:
        return [prune(problem, steps_of_stages(problem, joined), budget_bytes)]
    except InvalidPlanError:
        return []


def _neighbours(problem: Problem) -> list[list[int]]:
    """Return, for each node, those that make or read a storage which it makes or reads."""
    near: list[set[int]] = [set() for _ in problem.nodes]
    for storage in problem.storages:
        users = {storage.producer, *storage.fwd_users, *storage.bwd_users}
        if len(users) <= _MOST_USERS:
            for node in users:
                near[node] |= users - {node}
    return [sorted(nodes) for nodes in near]


def _draw_nodes(near: Sequence[Sequence[int]], draw: random.Random) -> frozenset[int]:
    """Draw the nodes to free: one or two groups of neighbours, in the order or in the graph."""
    count = len(near)

    def in_order(size: int) -> Iterable[int]:
        first = draw.randrange(max(1, count - size + 1))
        return range(first, min(count, first + size))

    def in_graph(size: int) -> Iterable[int]:
        found = [draw.randrange(count)]  # by distance
        for node in found:
            fresh = [other for other in near[node] if other not in found]
            found += draw.sample(fresh, min(len(fresh), size - len(found)))
        return found

    def group_of(size: int) -> Iterable[int]:
        return (in_graph if draw.random() < _IN_GRAPH else in_order)(size)

    size = draw.choice(_SIZES)
    if draw.random() < _ONE_GROUP:
        return frozenset(group_of(size))
    return frozenset({*group_of(size // 2), *group_of(size // 2)})


def _window(problem: Problem, steps: Steps, nodes: frozenset[int]) -> Window | None:
    """Return the window of these nodes, with the stages of their backwards and recomputations."""
    stage = stages_of(problem)
    own = [stage[k] for k in nodes if k in stage]
    if not own:
        return None
    for s, again in recomputed_by_stage(problem, steps).items():
        if any(k in nodes for k in again):
            own.append(s)
    return Window(steps, nodes, min(own), max(own))
