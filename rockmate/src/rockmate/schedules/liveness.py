"""Backward liveness: the live ranges that follow from a sequence of steps.

A plan says only which forwards and backwards run, and in which order. The storages that are alive
after each step, the forwards that record an autograd graph, and the moments at which memory is
freed all follow from it. They are optimal for the sequence: a storage lives exactly until its last
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rockmate.errors import InvalidPlanError
from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Step, first_forwards


def check_order(problem: Problem, steps: Sequence[Step]) -> None:
    """Refuse a sequence that is not one forward phase and then one backward phase.

    First forwards run in the order of the nodes, and backwards behind them in theirs. Between them
    any node that has run may run again. Then every storage is made before a step reads it, and
    nothing else can be wrong with the order.

    Raises:
        InvalidPlanError: names the first step that is out of place.
    """
    count = len(problem.nodes)
    order = problem.backward_order
    run = turn = 0
    while run < count:
        kind, node = steps[turn] if turn < len(steps) else ("", -1)
        if kind != "F" or not 0 <= node <= run:
            found = f"{kind}{node}" if kind else "the end of the plan"
            name = problem.nodes[run].name
            raise InvalidPlanError(
                f"step {turn} of the plan must be F{run} ({name}), found {found}: "
                f"a plan starts with the forward of all {count} nodes in order"
            )
        run += node == run
        turn += 1
    done = 0
    for t, (kind, node) in enumerate(steps[turn:], start=turn):
        if not 0 <= node < count or kind not in ("F", "B"):
            raise InvalidPlanError(
                f"step {t} of the plan is {kind}{node}, but the problem has nodes 0 to {count - 1}"
            )
        if kind == "B":
            if done == len(order) or order[done] != node:
                expected = f"B{order[done]}" if done < len(order) else "no further backward"
                raise InvalidPlanError(
                    f"step {t} of the plan is B{node} ({problem.nodes[node].name}), expected "
                    f"{expected}: backwards run once each, in the reverse of the forward order"
                )
            done += 1
        elif done == len(order):
            raise InvalidPlanError(
                f"step {t} of the plan recomputes node {node} ({problem.nodes[node].name}) after "
                f"the last backward, where nothing can read it; drop that step"
            )
    if done < len(order):
        node = order[done]
        raise InvalidPlanError(
            f"the plan ends before B{node} ({problem.nodes[node].name}); every node with a "
            f"backward step needs it exactly once"
        )


class Liveness(NamedTuple):
    """What follows from a sequence of steps, for each of them."""

    after: list[int]  # the set of storages (bit mask) that are alive after it
    records: list[bool]  # whether it is a recording forward: one that keeps its node's phantoms
    first: list[bool]  # whether it is the first forward of its node


def liveness(problem: Problem, steps: Sequence[Step]) -> Liveness:
    """Return the live ranges of a sequence of steps, which must have passed `check_order`.

    The last forward of a node before its backward is the recording one; the others drop phantoms as
    they run. For a node without phantoms the first forward counts as recording. Later ones do not,
    because they restore the random state.
    """
    products = problem.product_masks
    kept_products = [mask & ~problem.output_mask for mask in products]
    fwd_inputs = problem.fwd_input_masks
    bwd_inputs = problem.bwd_input_masks
    first = first_forwards(steps)
    after = [0] * len(steps)
    need = problem.output_mask
    for t in range(len(steps) - 1, -1, -1):
        after[t] = need
        kind, node = steps[t]
        if kind == "B":
            need |= bwd_inputs[node]
        elif first[t]:  # which also makes its outputs
            need = (need & ~products[node]) | fwd_inputs[node]
        else:
            need = (need & ~kept_products[node]) | fwd_inputs[node]
    phantoms = problem.phantom_masks
    records = []
    for t, (kind, node) in enumerate(steps):
        if kind == "B":
            records.append(False)
        elif phantoms[node]:
            records.append(bool(after[t] & phantoms[node]))
        else:
            records.append(first[t])
    return Liveness(after, records, first)
