"""Large-neighbourhood search: free a part of the current plan, let CP-SAT put it back better.

A window frees some nodes in some stages; the rest of the plan is a fixed background, so a window of
a network of any length is a small program. Windows are drawn deterministically: one run of
neighbouring nodes, or two runs that then can exchange memory with each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from rockmate.planners.edit import prune
from rockmate.problem import Problem
from rockmate.simulate import simulate
from rockmate.solvers.intervals import Window, solve_intervals
from rockmate.solvers.result import recomputed_by_stage, stages_of, steps_of_stages
from rockmate.steps import Steps


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
    source = _windows(problem, seed)
    for _ in range(windows):
        if stop() or cost <= 0:
            break
        nodes, size = next(source)
        window = _window(problem, current, nodes, size)
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


def _windows(problem: Problem, seed: int) -> Iterator[tuple[frozenset[int], int]]:
    """Yield sets of nodes to free, without end."""
    draw = random.Random(seed)
    count = len(problem.nodes)
    while True:
        size = draw.choice((16, 24, 36))
        if draw.random() < 0.4:
            first = draw.randrange(max(1, count - size + 1))
            yield frozenset(range(first, min(count, first + size))), size
        else:
            half = size // 2
            one = draw.randrange(max(1, count - half + 1))
            two = draw.randrange(max(1, count - half + 1))
            nodes = {*range(one, min(count, one + half)), *range(two, min(count, two + half))}
            yield frozenset(nodes), size


def _window(problem: Problem, steps: Steps, nodes: frozenset[int], size: int) -> Window | None:
    """The window of these nodes: the stages of their own backwards and of their recomputations."""
    stage = stages_of(problem)
    own = [stage[k] for k in nodes if k in stage]
    if not own:
        return None
    for s, again in recomputed_by_stage(problem, steps).items():
        if any(k in nodes for k in again):
            own.append(s)
    return Window(steps, nodes, min(own), max(own))
