"""Objective, bound, gap and seconds of every solver on the recorded instances.

    $ python -m planning.solvers                    # instances/*.json -> results/solvers.csv
    $ python -m planning.solvers --smoke
    $ python -m planning.solvers --only unet

No network is run, so commits can be compared on any machine. Backends:

    portfolio    what Rockmate does (effort fast)
    chain        the chain of blocks with options, alone
    cp-sat       retention intervals on the whole graph (where it has at most 130 nodes)
    cbc, highs   the 0/1 program on the whole graph (at most 70 nodes), under a time limit
    rotor        the dynamic program over the chain that rotor measured

The objective is the extra time in percent of a step without recomputation. The bound holds for all
schedules of the graph, whatever found it; rotor's chain is another problem and has none. Limits
but those of the 0/1 programs count work, so that objectives are the same at every run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import rotor
from harness.experiment import main
from harness.points import Experiment, Options, Point
from harness.worker import Outcome
from measures.strategies import least_ms
from measures.training import Row
from planning.instances import INSTANCES, Instance
from rockmate import InfeasibleBudgetError, SolverUnavailableError
from rockmate.planning import (
    Steps,
    best_segments,
    block_solver,
    chain_model,
    lower_bound,
    plan,
    simulate,
    solve_whole,
)

BUDGETS = ("70%", "50%", "35%")
ILP_LIMIT_S = {"smoke": 5.0, "cpu": 20.0, "paper": 300.0}
ILP_NODES, INTERVAL_NODES = 70, 130
CP_SAT_LIMIT = 2.0  # deterministic seconds


def points(options: Options) -> list[Point]:
    """Return every instance at every budget under every backend that has a chance."""
    found = []
    for path in sorted(INSTANCES.glob("*.json")):
        instance = Instance.from_json(path.read_text(encoding="utf-8"))
        nodes = len(instance.problem.nodes)
        ways = ["portfolio", "chain"]
        ways += ["rotor"] if instance.chain is not None else []
        ways += ["cp-sat"] if nodes <= INTERVAL_NODES else []
        ways += ["cbc", "highs"] if nodes <= ILP_NODES else []
        budgets = BUDGETS
        if options.size == "smoke":
            if path.stem != "fno-cpu-cpu":
                continue
            ways, budgets = ["portfolio", "cp-sat", "cbc", "rotor"], ("50%",)
        found += [
            Point("solvers", path.stem, options.size, 0, way, budget, options.seed)
            for budget in budgets
            for way in ways
        ]
    return found


def solve(point: Mapping[str, Any], device: str, warmup: int, repeats: int) -> Row:
    """Solve one recorded instance."""
    path = INSTANCES / f"{point['network']}.json"
    instance = Instance.from_json(path.read_text(encoding="utf-8"))
    budget = int(instance.plain_peak_bytes * float(point["budget"].rstrip("%")) / 100)
    row: Row = {
        "budget_bytes": budget,
        "plain_peak_bytes": instance.plain_peak_bytes,
        "nodes": len(instance.problem.nodes),
        "recorded": f"{instance.recorded['device']}, {instance.cost} times",
    }
    if point["strategy"] == "rotor":
        return row | _rotor(instance, budget, row)
    begin = time.perf_counter()
    steps, word = _steps(instance, budget, point, row)
    row |= {"solve_seconds": time.perf_counter() - begin, "solver": word}
    problem = instance.problem
    bound = lower_bound(problem, budget, cuts=2)
    if bound is not None and math.isfinite(bound):
        row["bound_percent"] = 100 * bound / problem.base_time_ms
    if steps is None:
        status = "infeasible" if word == "infeasible" else "timeout"
        raise Outcome(status, f"no plan found: {word}", **row)
    timeline = simulate(problem, steps)
    row["predicted_peak_bytes"] = timeline.peak_bytes
    row["planned_overhead_percent"] = 100 * timeline.overhead_ms / problem.base_time_ms
    if timeline.peak_bytes > budget:
        raise Outcome("failed", f"peak of {timeline.peak_bytes}, budget {budget}", **row)
    least = problem.base_time_ms + (row.get("bound_percent", 0.0)) / 100 * problem.base_time_ms
    step_ms = problem.base_time_ms + timeline.overhead_ms
    row["gap_percent"] = 100 * max(0.0, step_ms / least - 1)
    return row


def _steps(
    instance: Instance, budget: int, point: Mapping[str, Any], row: Row
) -> tuple[Steps | None, str]:
    """Return the steps that a backend finds, and what it says of them."""
    problem, way = instance.problem, point["strategy"]
    try:
        if way == "portfolio":
            found = plan(problem, budget, effort="fast")
            return found.steps, found.planner
        if way == "chain":
            model = chain_model(problem, block_solver("cp-sat", 0.05), merged=True)
            steps = None if model is None else model.plan(budget)
            return steps, "infeasible" if steps is None else "chain"
        if way == "cp-sat":
            hint = best_segments(problem, budget)
            result = solve_whole(problem, budget, hint=hint, deterministic_limit=CP_SAT_LIMIT)
        else:
            limit = ILP_LIMIT_S[point["size"]]
            result = solve_whole(
                problem, budget, backend=way, deterministic_limit=1e3, wall_limit_s=limit
            )
    except InfeasibleBudgetError as error:
        found_so_far = row | {"minimum_bytes": error.minimum_bytes}
        raise Outcome("infeasible", str(error), **found_so_far) from error
    except SolverUnavailableError as error:
        raise Outcome("refused", str(error), **row) from error
    return result.steps, result.status


def _rotor(instance: Instance, budget: int, row: Row) -> Row:
    assert instance.chain is not None
    begin = time.perf_counter()
    try:
        schedule = rotor.solve(instance.chain, budget)
    except rotor.InfeasibleBudgetError as error:
        raise Outcome("infeasible", str(error), **row) from error
    return {
        "solve_seconds": time.perf_counter() - begin,
        "solver": schedule.method,
        "nodes": len(instance.chain),
        "predicted_peak_bytes": schedule.peak_bytes,
        "planned_overhead_percent": 100 * (schedule.makespan_ms / least_ms(instance.chain) - 1),
    }


EXPERIMENTS = (Experiment("solvers", "planning.solvers:solve", points),)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS, __doc__ or ""))
