"""The smallest budget that is accepted, and the plan that proves it.

A budget is feasible if there is a plan for it. It is infeasible below `solvers.least_budget`.
Between the two, only a long search could tell. A refusal must be quick, so it names both figures;
`thorough=True` (for users: `effort="best"`) narrows the gap.

Everything here depends only on structure and bytes: every node takes one unit of time, and limits
count work instead of seconds. So the answer does not depend on the clock: a budget is refused
exactly if it is below the peak that this procedure reaches.
"""

from __future__ import annotations

import dataclasses
import time

from rockmate.errors import InfeasibleBudgetError
from rockmate.planners.search import Search
from rockmate.planners.squeeze import squeeze
from rockmate.planners.windows import in_node_order
from rockmate.problems.blocks import find_cuts
from rockmate.problems.problem import Problem, indices_of
from rockmate.schedules.baselines import checkpoint_segments, no_recomputation
from rockmate.schedules.liveness import liveness
from rockmate.schedules.prune import prune
from rockmate.schedules.report import exact_bytes, place_in_model
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps
from rockmate.solvers.intervals.solve import Window, solve_intervals
from rockmate.solvers.least_budget import QUICK_WORK, floor_bytes, least_budget
from rockmate.solvers.result import stages_of

_LEAST_BATCH_PERCENT = 5  # below this, a smaller batch is no useful advice
WHOLE_NODES = 60  # up to here the whole graph is searched for its least peak
_WHOLE_LIMIT = 0.05  # deterministic seconds, up to one of the clock
_WINDOW_LIMIT = 0.05
_WINDOW_NODES = 40
_ROUNDS = 12
_NEAR = 1.002  # of a lower bound; a lower peak is not worth a search of minutes


def low_memory_plan(problem: Problem) -> tuple[Steps, int]:
    """Return a plan of low peak and its peak, in milliseconds, from structure and bytes only."""
    count = len(problem.nodes)
    borders = [0, *(c + 1 for c in find_cuts(problem))]
    plans = [no_recomputation(problem)]
    seen = set()
    for parts in {1 << i for i in range(len(borders).bit_length())} | {len(borders)}:
        chosen = tuple(borders[i * len(borders) // parts] for i in range(min(parts, len(borders))))
        if chosen not in seen:
            seen.add(chosen)
            plans.append(checkpoint_segments(problem, chosen))
    step = max(1, round(count**0.5))
    plans.append(checkpoint_segments(problem, range(step, count, step)))
    plans.append(checkpoint_segments(problem, range(1, count)))
    return _lowest(problem, plans)


def minimum_peak(
    problem: Problem, enough_bytes: int = 0, *, thorough: bool = False
) -> tuple[Steps, int]:
    """Return the plan of least peak that this package finds, and its peak.

    The result does not depend on measured times. Graphs of any length are squeezed, which takes a
    second for hundreds of nodes and ends near the least peak; short graphs are also searched as a
    whole. With `thorough` the search goes on in windows around the moment of the peak. (Chains of
    low-memory blocks took up to 24 s, and gained a part in 7000 on one of 75 graphs.)

    The search ends early once a peak of at most `enough_bytes` is found. Its order does not depend
    on that argument, so neither does the answer whether `enough_bytes` are feasible.
    """
    unit = _unit_times(problem)
    bound = floor_bytes(unit)
    enough = max(enough_bytes, bound)
    steps, peak = low_memory_plan(unit)
    if peak > enough:
        squeezed = squeeze(unit, bound, peak)
        if squeezed is not None:
            steps, peak = _lowest(unit, [steps, squeezed])
    if peak > enough and len(problem.nodes) <= WHOLE_NODES:
        result = solve_intervals(
            unit, peak, objective="peak", hint=steps, deterministic_limit=_WHOLE_LIMIT
        )
        if result.steps is not None:
            steps, peak = _lowest(unit, [steps, result.steps])
    if thorough and peak > enough:
        enough = max(enough, int(_NEAR * least_budget(unit, peak)))
    if thorough and peak > enough:
        steps, peak = _improve_peak(unit, steps, peak, bound)
    return prune(unit, steps, max(peak, enough_bytes)), peak


def _unit_times(problem: Problem) -> Problem:
    nodes = tuple(
        dataclasses.replace(node, fwd_time_ms=1.0, bwd_time_ms=1.0) for node in problem.nodes
    )
    return dataclasses.replace(problem, nodes=nodes)


def _lowest(problem: Problem, plans: list[Steps]) -> tuple[Steps, int]:
    """Return the plan of least peak; among equals the one with fewest steps, then the first."""
    peaks = [simulate(problem, steps).peak_bytes for steps in plans]
    best = min(range(len(plans)), key=lambda i: (peaks[i], len(plans[i]), i))
    return plans[best], peaks[best]


def _improve_peak(problem: Problem, steps: Steps, peak: int, floor: int) -> tuple[Steps, int]:
    """Lower the peak by repeatedly solving a window around the moment of the peak."""
    ordered = in_node_order(problem, steps)
    if simulate(problem, ordered).peak_bytes > peak:
        return steps, peak
    current = ordered
    for attempt in range(_ROUNDS):
        if peak <= floor:
            break
        window = _peak_window(problem, current, wide=attempt % 2 == 1)
        result = solve_intervals(
            problem,
            peak - 1,
            objective="peak",
            window=window,
            max_runs=2,
            deterministic_limit=_WINDOW_LIMIT,
        )
        if result.steps is None:
            if attempt % 2 == 1:
                break
            continue
        found = simulate(problem, result.steps).peak_bytes
        if found >= peak:
            break
        current, peak = result.steps, found
        steps = current
    return steps, peak


def _peak_window(problem: Problem, steps: Steps, *, wide: bool) -> Window:
    """Return the window of the producers of storages alive at the peak, and of nearby nodes."""
    timeline = simulate(problem, steps)
    t = timeline.peak_step
    alive = liveness(problem, steps).after[t - 1] if t else 0
    stage = stages_of(problem)
    here = steps[t].node
    nodes = {here}
    limit = _WINDOW_NODES if wide else _WINDOW_NODES // 2
    for index in sorted(indices_of(alive), key=lambda i: (-problem.sizes[i], i)):
        if len(nodes) < limit:
            nodes.add(problem.storages[index].producer)
    reach = 1
    while len(nodes) < min(limit, len(problem.nodes)):
        nodes |= {max(0, here - reach), min(len(problem.nodes) - 1, here + reach)}
        reach += 1
        if reach > len(problem.nodes):
            break
    last = max((stage[k] for k in nodes if k in stage), default=1)
    return Window(steps, frozenset(nodes), 1, max(last, 1))


def feasible(run: Search) -> Steps:
    """Refuse a budget below the smallest feasible one; return a low-memory plan."""
    steps, peak = low_memory_plan(run.problem)
    if run.budget_bytes >= peak:
        return steps
    run.report(0.02, "smallest feasible budget")
    begin = time.perf_counter()
    steps, peak = minimum_peak(
        run.problem, enough_bytes=run.budget_bytes, thorough=run.effort.thorough_minimum
    )
    if run.budget_bytes < peak:
        raise infeasible(run.problem, run.budget_bytes, steps, peak)
    run.consider("minimum peak", steps, begin)
    return steps


def infeasible(problem: Problem, asked: int, steps: Steps, minimum: int) -> InfeasibleBudgetError:
    """Return the error for a budget below the smallest feasible one; it names the peak's step."""
    timeline = simulate(problem, steps)
    kind, k = steps[timeline.peak_step]
    node = problem.nodes[k]
    operation = f"{node.op or node.name} in {place_in_model(node.module_path)}"
    what = "backward" if kind == "B" else "forward"
    why = "its own inputs, results and workspace take all of it"
    bound = least_budget(problem, minimum, work=QUICK_WORK)
    advice = ["raise the budget"]
    percent = 100 * asked // minimum
    if percent >= _LEAST_BATCH_PERCENT:
        advice.append(f"reduce the batch, or the length of samples, to about {percent} %")
    if minimum > floor_bytes(problem):
        why = f"beside what must stay alive there; less than {bound} bytes can never do"
        if minimum > _NEAR * bound:
            advice.append("plan with effort='best', which looks longer for a plan within less")
    elif node.op.startswith("run_"):
        advice.append(
            f"plan inside of {place_in_model(node.module_path)}, which runs whole since something "
            "in its forward cannot be recorded: strict=True says what, and at which line"
        )
    else:
        advice.append(f"compute {operation} in smaller pieces, one after the other")
    return InfeasibleBudgetError(
        f"the budget must be at least {exact_bytes(minimum)}, and is {asked} bytes.\n"
        f"  Needed by: the {what} of {operation}; {why}.\n"
        f"  What to do: {'; or '.join(advice)}.",
        asked_bytes=asked,
        minimum_bytes=minimum,
        bound_bytes=bound,
    )
