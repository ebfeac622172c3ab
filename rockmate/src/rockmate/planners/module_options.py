"""Options of a module that is planned alone, as one layer among others, within two limits.

One limit is its peak. The other is what it holds from the end of its forward to the start of its
backward, while other modules run. The second limit needs no separate constraint. An added node
stands for the end of the forward and reads the outputs. A workspace of `peak - kept` at this node
limits what may be alive there (as in `options.py`). So every planner can plan within both limits.

Over a link, options also move what they save. A copy runs in the pass in which it begins: what goes
is gone when the forward ends, and what comes in starts in the backward. So copies of different
modules never meet on the link, and the times of options add up, however many modules move.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from rockmate.errors import InfeasibleBudgetError
from rockmate.options.options import (
    BlockOption,
    Grid,
    KnownBlocks,
    block_options,
    boxed,
    measure_option,
    pareto,
    spread,
)
from rockmate.planners.effort import effort_of
from rockmate.planners.moving import plan_with_moves
from rockmate.planners.portfolio import plan as plan_within
from rockmate.planners.resized import replan
from rockmate.problems.problem import Node, Problem
from rockmate.schedules.moves import Move, Moves, first_read
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.steps import Step, Steps
from rockmate.solvers import block_solver

_BOX_LIMIT = 0.05  # deterministic seconds for each box
_MOVING = Grid(2, 5)  # boxes in which moves are planned, too
_NO_WINDOWS = dataclasses.replace(effort_of("fast"), windows=0)  # which would take most of the time

Way = tuple[Steps, Moves]


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
    return Problem((*problem.nodes, closing), storages, problem.link)


def options_of(problem: Problem, ways: Iterable[Way]) -> tuple[BlockOption, ...]:
    """Return these steps and moves as options, with the bytes of this problem."""
    ending = with_end_of_forward(problem)
    end = len(problem.nodes)
    found = []
    for steps, moves in ways:
        option = measure_option(ending, *_with_end(end, steps, moves))
        found.append(dataclasses.replace(option, steps=steps, moves=moves))
    return tuple(found)


def module_options(
    problem: Problem, *, backend: str = "cp-sat", host_part: int | None = None
) -> tuple[BlockOption, ...]:
    """Return the undominated options of a module, fastest first.

    `saved_bytes` includes the outputs, `bwd_peak_bytes` the gradients of the outputs. With
    `host_part`, some of those that move take at most so much elsewhere.
    """
    ending = with_end_of_forward(problem)
    grid = _grid(len(problem.nodes))
    found = block_options(ending, block_solver(backend, _BOX_LIMIT), grid)
    moving = []
    if (link := problem.link) is not None:
        limits = link.host_bytes, link.host_bytes if host_part is None else host_part
        for limit in dict.fromkeys(limits):
            limited = dataclasses.replace(link, host_bytes=limit)
            moving += _moving(dataclasses.replace(ending, link=limited), found)
    options = options_of(
        problem, (_without_end(problem, o.steps, o.moves) for o in (*found, *moving))
    )
    return (options[0], *pareto(options[1:])) if moving else options  # the first keeps everything


def _grid(nodes: int) -> Grid:
    # A large module costs seconds per box, so it gets few boxes.
    return Grid(5, 10) if nodes <= 24 else Grid(4, 6) if nodes <= 48 else Grid(3, 4)


def _moving(ending: Problem, still: Sequence[BlockOption]) -> list[BlockOption]:
    """Return options that move some of what they save, each from the best that moves nothing."""
    peaks = [option.peak_bytes for option in still]
    saves = [option.saved_bytes for option in still]
    found = []
    for peak, save in itertools.product(
        spread(min(peaks), max(peaks), _MOVING.peaks), spread(min(saves), max(saves), _MOVING.saves)
    ):
        fitting = [o for o in still if o.peak_bytes <= peak and o.saved_bytes <= save]
        if not fitting or not (best := min(fitting, key=lambda o: o.overhead_ms)).overhead_ms:
            continue

        def known(problem: Problem, budget_bytes: int, best: BlockOption = best) -> Plan:
            return make_plan(problem, best.steps, budget_bytes, "known option")

        box = boxed(ending, peak, min(peak, save))
        plan = plan_with_moves(box, peak, known, _NO_WINDOWS)
        if plan.moves:
            found.append(measure_option(ending, plan.steps, plan.moves))
    return found


def plan_keeping(
    problem: Problem, budget_bytes: int, most_kept_bytes: int | None, **options: Any
) -> Plan:
    """Return a plan within the budget that holds at most `most_kept_bytes` between its passes.

    `options` are those of `plan`, which this is without that limit.

    Raises:
        InfeasibleBudgetError: there is none; `minimum_bytes` would suffice as a limit of both peak
            and kept bytes.
    """
    if most_kept_bytes is None:
        return plan_within(problem, budget_bytes, **options)
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
    most_kept_bytes: int | None,
) -> Plan | None:
    """Return a plan like `plan_keeping`, derived from plans for other sizes, or None."""
    if most_kept_bytes is None:
        return replan(problem, budget_bytes, known, blocks)
    others = [
        (with_end_of_forward(other), _with_end(len(other.nodes), steps)[0])
        for other, steps in known
    ]
    limited = _limited(problem, budget_bytes, most_kept_bytes)
    plan = replan(limited, budget_bytes, others, blocks)
    return None if plan is None else _plan_of(problem, budget_bytes, plan)


def _limited(problem: Problem, budget_bytes: int, most_kept_bytes: int) -> Problem:
    kept = min(budget_bytes, most_kept_bytes)
    return boxed(with_end_of_forward(problem), budget_bytes, kept)


def _with_end(end: int, steps: Steps, moves: Moves = ()) -> Way:
    """Return a plan with the end of the forward as a step, at which what has gone is elsewhere."""
    later = (
        Move(m.storage, *(t + (t >= end) for t in (m.out_after, m.gone_after, m.back_before)))
        for m in moves
    )
    return (*steps[:end], Step("F", end), *steps[end:]), tuple(later)


def _without_end(problem: Problem, steps: Steps, moves: Moves) -> Way:
    """Return a plan without the end of the forward, whose copies run in the pass they begin in."""
    end = len(problem.nodes)
    own = tuple(step for step in steps if step.node != end)
    found = []
    for m in moves:
        out, gone = (t - (t >= end) for t in (m.out_after, m.gone_after))
        back = m.back_before - (m.back_before > end)
        if out < end <= gone:
            is_read = any(m.storage in problem.reads(*own[t]) for t in range(end, gone + 1))
            out, gone = (end, gone) if is_read else (min(out, end - 1), end - 1)
        if back <= end and first_read(problem, own, Move(m.storage, out, gone, back)) >= end:
            back = end
        found.append(Move(m.storage, out, gone, back))
    return own, tuple(found)


def _plan_of(problem: Problem, budget_bytes: int, plan: Plan) -> Plan:
    """Return a plan without the end of the forward."""
    steps, moves = _without_end(problem, plan.steps, plan.moves)
    about = {"tried": plan.tried, "plan_seconds": plan.plan_seconds}
    return make_plan(problem, steps, budget_bytes, plan.planner, moves, **about)
