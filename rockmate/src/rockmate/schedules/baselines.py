"""Plans that need no solver: the papers' baselines, and low-memory starting points."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rockmate.problems.blocks import find_cuts
from rockmate.problems.problem import Problem
from rockmate.schedules.prune import prune
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step, Steps


def no_recomputation(problem: Problem) -> Steps:
    """Return the plan that keeps everything, as eager training does."""
    forwards = tuple(Step("F", k) for k in range(len(problem.nodes)))
    return forwards + tuple(Step("B", k) for k in problem.backward_order)


def keeping_all_bytes(problem: Problem) -> int:
    """Return the peak of a step that keeps everything."""
    return simulate(problem, no_recomputation(problem)).peak_bytes


def checkpoint_segments(problem: Problem, borders: Sequence[int]) -> Steps:
    """Return the plan that recomputes each segment of nodes just before its backward.

    A segment is a range of nodes between two borders (indices of first nodes). Storages that cross
    a border are kept. All others are recomputed once, when the segment's backward starts. The last
    segment is not recomputed, because its backward follows at once.
    """
    count = len(problem.nodes)
    starts = sorted({0, *(b for b in borders if 0 < b < count)})
    ends = [*starts[1:], count]
    steps = [Step("F", k) for k in range(count)]
    for segment in reversed(range(len(starts))):
        nodes = range(starts[segment], ends[segment])
        backwards = [Step("B", k) for k in reversed(nodes) if problem.nodes[k].has_backward]
        if backwards and segment < len(starts) - 1:
            steps += _needed(problem, nodes)
        steps += backwards
    return tuple(steps)


def recompute_all(problem: Problem) -> Steps:
    """Return the plan that recomputes every block between two cuts: one checkpoint per block."""
    return checkpoint_segments(problem, _borders(problem))


def chen(problem: Problem) -> Steps:
    """Return the plan of Chen et al. 2016: about √n segments of equal length."""
    borders = [0, *_borders(problem)]
    count = max(1, math.isqrt(len(borders)))
    return checkpoint_segments(problem, [borders[i * len(borders) // count] for i in range(count)])


def best_segments(problem: Problem, budget_bytes: int) -> Steps | None:
    """Return the cheapest pruned plan over all numbers of equal segments, or None if none fits."""
    borders = [0, *_borders(problem)]
    best: tuple[float, Steps] | None = None
    tried = set()
    count = 1
    while count <= len(borders):
        chosen = tuple(borders[i * len(borders) // count] for i in range(count))
        if chosen not in tried:
            tried.add(chosen)
            steps = checkpoint_segments(problem, chosen)
            if simulate(problem, steps).peak_bytes <= budget_bytes:
                steps = prune(problem, steps, budget_bytes)
                overhead = simulate(problem, steps).overhead_ms
                if best is None or overhead < best[0]:
                    best = overhead, steps
        count = max(count + 1, count * 5 // 4)
    return best[1] if best else None


def _borders(problem: Problem) -> list[int]:
    """Return the first nodes of the blocks between cuts; all nodes if the graph has no cut."""
    cuts = find_cuts(problem)
    borders = [cut + 1 for cut in cuts]
    if len(borders) < math.isqrt(len(problem.nodes)):
        return list(range(1, len(problem.nodes)))
    return borders


def _needed(problem: Problem, nodes: range) -> list[Step]:
    """Return the forwards of a segment whose results its backward reads."""
    needed = 0
    for k in nodes:
        needed |= problem.bwd_input_masks[k]
    steps = []
    for k in reversed(nodes):
        crossing = 0  # kept across the border, so made once
        for index in problem.products[k]:
            if any(u >= nodes.stop for u in problem.storages[index].fwd_users):
                crossing |= 1 << index
        own = problem.product_masks[k] & ~problem.output_mask & ~crossing
        if needed & own:
            steps.append(Step("F", k))
            needed |= problem.fwd_input_masks[k]
    return list(reversed(steps))
