"""Options of a module that is planned alone, as one layer among others, within two limits.

One limit is its peak. The other is what it holds from the end of its forward to the start of its
backward, while other modules run. The second limit needs no separate constraint. An added node
stands for the end of the forward and reads the outputs. A workspace of `peak - kept` at this node
limits what may be alive there (as in `options.py`). So every planner can plan within both limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rockmate.errors import InfeasibleBudgetError
from rockmate.options.known_blocks import KnownBlocks
from rockmate.options.options import BlockOption, Grid, block_options, boxed, measure_option
from rockmate.planners.portfolio import plan as plan_within
from rockmate.planners.resized import replan
from rockmate.problems.problem import Node, Problem
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.steps import Step, Steps, end_of_forward
from rockmate.solvers import block_solver

_BOX_LIMIT = 0.05  # deterministic seconds for each box


def with_end_of_forward(problem: Problem) -> Problem:
    """Return the problem with an added node, the end of the forward, which reads the outputs."""
    end = len(problem.nodes)
    storages = tuple(
        dataclasses.replace(storage, fwd_users=(*storage.fwd_users, end))
        if storage.is_output
        else storage
        for storage in problem.storages
    )
    closing = Node("end of the forward", 0.0, has_backward=False)
    return Problem((*problem.nodes, closing), storages)


def options_of(problem: Problem, many: Iterable[Steps]) -> tuple[BlockOption, ...]:
    """Return these steps as options, with the bytes of this problem."""
    ending = with_end_of_forward(problem)
    end = len(problem.nodes)
    found = []
    for steps in many:
        option = measure_option(ending, _with_end(end, steps))
        found.append(dataclasses.replace(option, steps=steps))
    return tuple(found)


def module_options(problem: Problem, *, backend: str = "cp-sat") -> tuple[BlockOption, ...]:
    """Return the undominated options of a module, fastest first.

    `saved_bytes` includes the outputs, `bwd_peak_bytes` the gradients of the outputs.
    """
    count = len(problem.nodes)
    # A large module costs seconds per box, so it gets few boxes.
    grid = Grid(5, 10) if count <= 24 else Grid(4, 6) if count <= 48 else Grid(3, 4)
    found = block_options(with_end_of_forward(problem), block_solver(backend, _BOX_LIMIT), grid)
    without_end = (tuple(s for s in option.steps if s.node != count) for option in found)
    return options_of(problem, without_end)


def plan_keeping(problem: Problem, budget_bytes: int, most_kept_bytes: int, **options: Any) -> Plan:
    """Return a plan within the budget that holds at most `most_kept_bytes` between its passes.

    `options` are those of `plan`.

    Raises:
        InfeasibleBudgetError: there is none; `minimum_bytes` would suffice as a limit of both peak
            and kept bytes.
    """
    try:
        limited = _limited(problem, budget_bytes, most_kept_bytes)
        plan = plan_within(limited, budget_bytes, **options)
    except InfeasibleBudgetError as error:
        raise error.reworded(
            f"a module that may hold {budget_bytes} bytes at its peak, and {most_kept_bytes} from "
            f"its forward to its backward, cannot be run for a call of this kind ({error})"
        ) from None
    return _plan_of(problem, budget_bytes, plan)


def replan_keeping(
    problem: Problem,
    budget_bytes: int,
    known: Sequence[tuple[Problem, Steps]],
    blocks: KnownBlocks,
    most_kept_bytes: int,
) -> Plan | None:
    """Return a plan like `plan_keeping`, derived from plans for other sizes, or None."""
    others = [
        (with_end_of_forward(other), _with_end(len(other.nodes), steps)) for other, steps in known
    ]
    limited = _limited(problem, budget_bytes, most_kept_bytes)
    plan = replan(limited, budget_bytes, others, blocks)
    return None if plan is None else _plan_of(problem, budget_bytes, plan)


def _limited(problem: Problem, budget_bytes: int, most_kept_bytes: int) -> Problem:
    kept = min(budget_bytes, most_kept_bytes)
    return boxed(with_end_of_forward(problem), budget_bytes, kept)


def _with_end(end: int, steps: Steps) -> Steps:
    at = end_of_forward(steps, end)
    return (*steps[:at], Step("F", end), *steps[at:])


def _plan_of(problem: Problem, budget_bytes: int, plan: Plan) -> Plan:
    """Return a plan without the end of the forward."""
    steps = tuple(step for step in plan.steps if step.node != len(problem.nodes))
    tried, seconds = plan.tried, plan.plan_seconds
    return make_plan(problem, steps, budget_bytes, plan.planner, tried=tried, plan_seconds=seconds)
