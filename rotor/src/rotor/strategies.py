"""Schedules to compare with, one signature: `strategy(chain, budget_bytes, **its own arguments)`.

All of them return a `Schedule` in the same four operations, costed by the same simulator. Some
ignore the budget; `peak_bytes` then says what their schedule takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

from rotor.errors import InfeasibleBudgetError
from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedules.simulate import Schedule
from rotor.solver.intervals import solve_intervals
from rotor.solver.table import fastest_ops, solve

Strategy: TypeAlias = Callable[..., Schedule]


def no_checkpointing(chain: Chain, budget_bytes: int | None = None) -> Schedule:
    """Keep everything, as plain autograd does."""
    return Schedule.from_ops(chain, fastest_ops(chain), "no recomputation")


def recompute_all(chain: Chain, budget_bytes: int | None = None) -> Schedule:
    """Keep only the input, and recompute from it before every backward: the least memory held.

    The number of forward operations grows with the square of the number of stages.
    """
    ops: list[Op] = []
    for k in reversed(range(len(chain))):
        ops += [*_sweep(0, k), *_record_and_back(chain, k, k)]
    return Schedule.from_ops(chain, ops, "recompute all")


def chen(chain: Chain, budget_bytes: int | None = None, *, segments: int = 2) -> Schedule:
    """Keep the input of each segment, as `torch.utils.checkpoint.checkpoint_sequential` does.

    Segments have equal length; the last one takes the rest and is not recomputed. With
    about sqrt(n) segments this is the strategy of Chen, Xu, Zhang, Guestrin: *Training deep nets
    with sublinear memory cost*, 2016 (arXiv:1604.06174).
    """
    count = len(chain)
    if not 1 <= segments <= count:
        raise ValueError(
            f"segments is {segments}, and the chain has {count} stages. Give 1 to {count}."
        )
    length = count // segments
    starts = [length * index for index in range(segments)]
    ops: list[Op] = []
    for start, end in itertools.pairwise(starts):
        ops += _sweep(start, end)
    ops += _record_and_back(chain, starts[-1], count - 1)
    for start, end in reversed(list(itertools.pairwise(starts))):
        ops += _record_and_back(chain, start, end - 1)
    return Schedule.from_ops(chain, ops, f"Chen, {segments} segments")


def revolve(
    chain: Chain, budget_bytes: int | None = None, *, checkpoints: int | None = None
) -> Schedule:
    """Place checkpoints optimally for stages of equal time and size.

    Griewank, Walther: *Algorithm 799: Revolve*, ACM TOMS 26(1), 2000. One stage at a time is run
    with grad. The default of `checkpoints` is the largest number whose true peak is in the budget.

    Raises:
        InfeasibleBudgetError: not even the input alone (no further checkpoint) fits.
    """
    if checkpoints is not None:
        if checkpoints < 0:
            raise ValueError(f"checkpoints is {checkpoints}. Give 0 (the input only) or more.")
        return Schedule.from_ops(
            chain, _revolve_ops(chain, checkpoints), f"Revolve, {checkpoints} checkpoints"
        )
    if budget_bytes is None:
        raise ValueError("revolve needs a budget or a number of checkpoints. Give one of them.")
    least: Schedule | None = None
    for count in reversed(range(len(chain))):
        schedule = revolve(chain, checkpoints=count)
        if schedule.peak_bytes <= budget_bytes:
            return schedule
        if least is None or schedule.peak_bytes < least.peak_bytes:
            least = schedule
    assert least is not None
    raise InfeasibleBudgetError(
        budget_bytes, least.peak_bytes, len(chain), "This is for Revolve; others may need less."
    )


optimal = solve
intervals = solve_intervals  # which may drop stored tensors

STRATEGIES: dict[str, Strategy] = {
    "optimal": optimal,
    "intervals": intervals,
    "none": no_checkpointing,
    "chen": chen,
    "revolve": revolve,
    "recompute_all": recompute_all,
}


def _sweep(start: int, end: int) -> list[Op]:
    """Run stages start..end-1 without recording, from x[start], which is kept, to x[end]."""
    if start == end:
        return []
    return [ForwardCheckpoint(start), *(ForwardNoGrad(k) for k in range(start + 1, end))]


def _record_and_back(chain: Chain, start: int, last: int) -> list[Op]:
    chosen = chain.fastest_options
    stages = range(start, last + 1)
    forward: list[Op] = [ForwardEnableGrad(k, chosen[k]) for k in stages]
    return forward + [Backward(k, chosen[k]) for k in reversed(stages)]


def revolve_costs(length: int, checkpoints: int) -> list[list[int]]:
    """Return cost[c][l]: forward steps of l equal stages with c checkpoints beside their input.

    cost[c][l] = min over i of i + cost[c-1][l-i] + cost[c][i]; the stage before each backward,
    which runs with grad, is not counted. Without checkpoints it is l (l - 1) / 2.
    """
    costs = [[size * (size - 1) // 2 for size in range(length + 1)]]
    for _ in range(checkpoints):
        fewer, row = costs[-1], [0, 0]
        for size in range(2, length + 1):
            row.append(min(i + fewer[size - i] + row[i] for i in range(1, size)))
        costs.append(row[: length + 1])
    return costs


def _revolve_ops(chain: Chain, checkpoints: int) -> list[Op]:
    costs = revolve_costs(len(chain), checkpoints)
    ops: list[Op] = []
    todo = [(0, len(chain), checkpoints)]  # (first stage, number of stages, free checkpoints)
    while todo:
        first, size, free = todo.pop()
        if size == 1 or free == 0:
            for k in reversed(range(first, first + size)):
                ops += [*_sweep(first, k), *_record_and_back(chain, k, k)]
            continue
        fewer, row = costs[free - 1], costs[free]
        split = min(range(1, size), key=lambda i: i + fewer[size - i] + row[i])
        ops += _sweep(first, first + split)
        todo.append((first, split, free))
        todo.append((first + split, size - split, free - 1))
    return ops
