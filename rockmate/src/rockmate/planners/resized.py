"""A plan at other sizes, derived from plans of the same graph, mostly without a solver.

Batches of different lengths give problems that differ only in bytes and times. So steps that
solvers found for one problem, or for its blocks, are tried on the others. The exact simulator gives
their cost, the chain's dynamic program chooses again among options of blocks, and recomputations
that the budget does not need are dropped. A new size is thus planned in the time of a few
simulations. If no known plan fits, the graph is squeezed into the budget, and a few windows are
searched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rockmate.options.options import KnownBlocks
from rockmate.planners.chain import chain_of
from rockmate.planners.effort import EFFORTS
from rockmate.planners.search import Search
from rockmate.planners.squeeze import squeeze
from rockmate.planners.windows import improve
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import Plan
from rockmate.schedules.prune import prune
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps

_SLOTS = 100  # of the chain's program; many more would take longer than a training step
_LOOKS = 8  # schedules of the chain that are tried
_WINDOWS = 4  # a fraction of a second
_MOST_PLANS = 4  # plans of the nearest sizes that are tried


def replan(
    problem: Problem, budget_bytes: int, known: Sequence[tuple[Problem, Steps]], blocks: KnownBlocks
) -> Plan | None:
    """Return the fastest plan within the budget that known plans lead to, or None.

    `known` are problems of the same structure, each with the steps of a plan for any budget.
    """
    run = Search(problem, budget_bytes, EFFORTS["fast"], "cp-sat", 0, "resized", None)
    everything = no_recomputation(problem)
    if simulate(problem, everything).peak_bytes <= budget_bytes:
        run.take(everything, "none")
        return run.finish(bounded=False)
    size = sum(problem.sizes)
    nearest = sorted(known, key=lambda pair: abs(sum(pair[0].sizes) - size))
    for steps in dict.fromkeys(steps for _, steps in nearest[:_MOST_PLANS]):
        begin = time.perf_counter()
        timeline = simulate(problem, steps)
        if timeline.peak_bytes <= budget_bytes:
            run.consider("a plan of another size", prune(problem, steps, budget_bytes), begin)
    chained = False
    for pinned in blocks.pinned:
        for merged in (False, True):
            begin = time.perf_counter()
            model = chain_of(problem, blocks.options, merged=merged, pinned=pinned)
            if model is None:
                continue
            found = model.quick_plan(budget_bytes, slots=_SLOTS, looks=_LOOKS)
            if found is not None:
                pruned = prune(problem, found, budget_bytes)
                run.consider(f"chain of known {model.name}", pruned, begin)
                chained = run.best is not None
    if not chained:  # a chain's plan is always better
        _squeeze_and_search(run)
    return None if run.best is None else run.finish(bounded=False)


def _squeeze_and_search(run: Search) -> None:
    problem, budget_bytes, fitted = run.problem, run.budget_bytes, run.best is not None
    run.attempt("squeezed", lambda: _squeezed(problem, budget_bytes))
    if not fitted and run.best is not None:  # larger than all before
        best, limit = run.best, run.effort.window_limit
        run.attempt(
            "search in windows",
            lambda: improve(problem, best, budget_bytes, windows=_WINDOWS, window_limit=limit),
        )


def _squeezed(problem: Problem, budget_bytes: int) -> Steps | None:
    steps = squeeze(problem, budget_bytes, budget_bytes)
    return None if steps is None else prune(problem, steps, budget_bytes)
