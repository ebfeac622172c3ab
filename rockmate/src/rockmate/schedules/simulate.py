"""The exact simulator: bytes after, and peak during, each step of a plan.

It checks every planner, and makes the printed prediction. It shares no arithmetic with the solvers,
and rounds nothing: sizes are the bytes of the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rockmate.errors import InvalidPlanError
from rockmate.problems.problem import Problem
from rockmate.schedules.liveness import check_order, liveness
from rockmate.schedules.moves import Move, check_moves, clocks_of, comings_of
from rockmate.schedules.steps import Step, end_of_forward


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory and time of a sequence of steps.

    Bytes include storages, activation gradients and rerun states: everything in the budget. What is
    moved elsewhere is not in it.
    """

    bytes_after: tuple[int, ...]  # alive after each step
    peak_during: tuple[int, ...]  # maximum while each step runs
    peak_bytes: int
    peak_step: int  # index of the first step that reaches the peak; -1 for an empty plan
    overhead_ms: float  # time of every forward beyond each node's first, and of waiting
    stall_ms: float = 0.0  # of it: computing waits for storages that are moved
    # Between forward and backward; what then comes back takes its memory in the backward.
    between_bytes: int = 0

    def __repr__(self) -> str:
        steps = len(self.bytes_after)
        return f"<timeline of {steps} steps: peak {self.peak_bytes} bytes at {self.peak_step}>"


def simulate(
    problem: Problem,
    steps: Sequence[Step],
    moves: Sequence[Move] = (),
    *,
    budget_bytes: int | None = None,
) -> Timeline:
    """Return the exact memory timeline of a plan, in one pass over its steps.

    Bytes follow from steps and moves alone. The problem's link tells how long steps wait for moves.

    Raises:
        InvalidPlanError: the steps are out of order, a move is impossible, or the peak is above
            `budget_bytes`.
    """
    check_order(problem, steps)
    after, records, first = liveness(problem, steps)
    stall_ms = 0.0
    back = [0] * len(steps)
    if moves:
        check_moves(problem, steps, moves)
        away, back = comings_of(len(steps), moves)
        after = [alive & ~gone for alive, gone in zip(after, away, strict=True)]
        assert problem.link is not None
        stall_ms = clocks_of(problem, steps, moves, problem.link).stall_ms
    grads = _gradient_bytes(problem, steps)
    state_before, state_after = _rerun_state_bytes(problem, steps)

    sizes = problem.sizes
    products = problem.product_masks
    peaks, peaks_nograd = problem.forward_peaks, problem.forward_peaks_nograd
    nodes = problem.nodes
    bytes_after: list[int] = []
    peak_during: list[int] = []
    alive = held = 0
    overhead_ms = 0.0
    for t, (kind, node) in enumerate(steps):
        made = 0
        if kind == "F":
            own = peaks[node] if records[t] else peaks_nograd[node]
            made = products[node]
            if not first[t]:
                overhead_ms += nodes[node].fwd_time_ms
        else:
            own = nodes[node].bwd_peak_bytes
        peak_during.append(held + grads[t] + state_before[t] + own)
        coming = back[t + 1] if t + 1 < len(steps) else 0  # its memory is taken before that step
        changed = alive ^ ((alive | made | coming) & after[t])
        alive ^= changed
        while changed:
            low = changed & -changed
            changed ^= low
            size = sizes[low.bit_length() - 1]
            held += size if alive & low else -size
        grads_after = grads[t + 1] if t + 1 < len(steps) else 0
        bytes_after.append(held + grads_after + state_after[t])

    peak_bytes = max(peak_during, default=0)
    peak_step = peak_during.index(peak_bytes) if peak_during else -1
    if budget_bytes is not None and peak_bytes > budget_bytes:
        kind, node = steps[peak_step]
        raise InvalidPlanError(
            f"the plan must stay within {budget_bytes} bytes, but step {peak_step} "
            f"({kind}{node}, {nodes[node].name}) needs {peak_bytes}"
        )
    turn = end_of_forward(steps, len(nodes))
    coming_bytes = problem.bytes_of(back[turn]) if turn < len(steps) else 0
    return Timeline(
        *(tuple(bytes_after), tuple(peak_during), peak_bytes, peak_step),
        *(overhead_ms + stall_ms, stall_ms),
        bytes_after[turn - 1] - coming_bytes if steps else 0,
    )


def recompute_counts(problem: Problem, steps: Sequence[Step]) -> list[int]:
    """Return the number of recomputations of each node."""
    counts = [-1] * len(problem.nodes)
    for kind, node in steps:
        if kind == "F":
            counts[node] += 1
    return counts


def _gradient_bytes(problem: Problem, steps: Sequence[Step]) -> list[int]:
    """Return the activation gradients alive at each step: those before the next backward."""
    first = end_of_forward(steps, len(problem.nodes))
    grads = [0] * len(steps)
    current = 0
    for t in range(len(steps) - 1, first - 1, -1):
        kind, node = steps[t]
        if kind == "B":
            current = problem.nodes[node].grads_before_bytes
        grads[t] = current
    return grads


def _rerun_state_bytes(problem: Problem, steps: Sequence[Step]) -> tuple[list[int], list[int]]:
    """Return the bytes of rerun states that are alive during each step, and after it.

    A rerun state lives from a node's first forward to its last, both included, if they differ.
    """
    during = [0] * len(steps)
    after = [0] * len(steps)
    runs: dict[int, list[int]] = {}
    for t, (kind, node) in enumerate(steps):
        if kind == "F" and problem.nodes[node].rerun_state_bytes:
            runs.setdefault(node, []).append(t)
    starts, ends = [0] * len(steps), [0] * len(steps)
    for node, at in runs.items():
        if len(at) > 1:
            starts[at[0]] += problem.nodes[node].rerun_state_bytes
            ends[at[-1]] += problem.nodes[node].rerun_state_bytes
    current = 0
    for t in range(len(steps)):
        during[t] = current + starts[t]
        current = after[t] = during[t] - ends[t]
    return during, after
