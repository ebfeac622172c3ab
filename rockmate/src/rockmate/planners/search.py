"""Large-neighbourhood search: free a part of the current plan, let CP-SAT put it back better.

A window frees some nodes in some stages; the rest of the plan is a fixed background, so a window of
a network of any length is a small program. Windows are drawn by a seeded generator: one run of
neighbouring nodes, or two runs that then can exchange memory with each other. Laying them around
what the plan recomputes was tried and found no better.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from rockmate.planners.edit import prune
from rockmate.problem import Problem
from rockmate.simulate import simulate
from rockmate.solvers.intervals import Window, solve_intervals
from rockmate.solvers.result import recomputed_by_stage, stages_of, steps_of_stages
from rockmate.steps import Steps

_SIZES = (16, 24, 36)  # nodes of a window: what CP-SAT solves in a fraction of a second
_ONE_RUN = 0.4  # share of windows that are one run of neighbouring nodes


def in_node_order(problem: Problem, steps: Steps) -> Steps:
    """Return the steps with the recomputations of each stage in node order, each at most once.

    That is the form which windows can change. Its peak may differ from the original's.
    """
    return steps_of_stages(problem, recomputed_by_stage(problem, steps))


def improve(
    problem: Problem,
    steps: Steps,
    budget_bytes: int,
    *,
    windows: int,
    window_limit: float = 0.1,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Steps:
    """Return steps that are at least as fast, after trying so many windows.

    `window_limit` is in deterministic seconds, about four of the clock. Deterministic if `stop` is.
    Steps that do not fit the budget in node order are returned as they are.
    """
    current = prune(problem, in_node_order(problem, steps), budget_bytes)
    timeline = simulate(problem, current)
    best = simulate(problem, steps)
    if timeline.peak_bytes > budget_bytes:
        return steps
    cost = timeline.overhead_ms
    draw = random.Random(seed)
    for _ in range(windows):
        if stop() or cost <= 0:
            break
        window = _window(problem, current, _draw_nodes(len(problem.nodes), draw))
        if window is None:
            continue
        result = solve_intervals(
            problem,
            budget_bytes,
            window=window,
            max_runs=2,
            deterministic_limit=window_limit,
            seed=seed,
        )
        if result.steps is None:
            continue
        found = prune(problem, result.steps, budget_bytes)
        timeline = simulate(problem, found)
        if timeline.peak_bytes <= budget_bytes and timeline.overhead_ms < cost:
            current, cost = found, timeline.overhead_ms
    return current if cost <= best.overhead_ms else steps


def _draw_nodes(count: int, draw: random.Random) -> frozenset[int]:
    """Draw the nodes to free: one run of neighbours, or two."""

    def run_of(size: int) -> range:
        first = draw.randrange(max(1, count - size + 1))
        return range(first, min(count, first + size))

    size = draw.choice(_SIZES)
    if draw.random() < _ONE_RUN:
        return frozenset(run_of(size))
    return frozenset({*run_of(size // 2), *run_of(size // 2)})


def _window(problem: Problem, steps: Steps, nodes: frozenset[int]) -> Window | None:
    """The window of these nodes: the stages of their own backwards and of their recomputations."""
    stage = stages_of(problem)
    own = [stage[k] for k in nodes if k in stage]
    if not own:
        return None
    for s, again in recomputed_by_stage(problem, steps).items():
        if any(k in nodes for k in again):
            own.append(s)
    return Window(steps, nodes, min(own), max(own))
