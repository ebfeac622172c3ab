"""What is measured of planning, at a point; every function runs in a process of its own."""

from __future__ import annotations

import time

import torch

import rockmate
import rotor
from harness import meter
from harness.networks import Case, case_of
from harness.worker import Outcome
from measures.strategies import least_ms, sequential
from measures.training import Point, Row, budget_of, on_device
from rockmate.planning import (
    Grid,
    Problem,
    block_solver,
    chain_model,
    lower_bound,
    make_plan,
    no_recomputation,
    plan,
    simulate,
    solve_ilp,
    stopwatch,
)

CHECKMATE_LIMIT_S = {"smoke": 5.0, "cpu": 20.0, "paper": 600.0}


def problem_of(case: Case, device: str, cost: str) -> tuple[Problem, Row]:
    """Return what the planners are given for a network, and how long it took to find out."""
    place = torch.device(device)
    ready = on_device(case, place)
    module = rockmate.Rockmate(
        ready.model, ready.sample, 1 << 60, cost=cost, self_test=False, cache=False
    )
    seconds = module.planning_seconds
    problem = module.plan.problem
    return problem, {
        "prepare_seconds": sum(
            seconds.get(phase, 0.0) for phase in ("capture", "measurement", "calibration")
        ),
        "nodes": len(problem.nodes),
        "plain_peak_bytes": simulate(problem, no_recomputation(problem)).peak_bytes,
    }


def options(point: Point, device: str, warmup: int, repeats: int) -> Row:
    """Plan with a grid of so many peak and save budgets per block ("5x8"), chain alone."""
    peaks, saves = (int(n) for n in point["strategy"].split("x"))
    case = case_of(point["network"], point["size"], point["batch"], point["seed"])
    problem, row = problem_of(case, device, "flops")
    budget = budget_of(point["budget"], row["plain_peak_bytes"])
    begin = time.perf_counter()
    with stopwatch() as parts:
        model = chain_model(
            problem, block_solver("cp-sat", 0.05), merged=True, grid=Grid(peaks, saves)
        )
        steps = None if model is None else model.plan(budget)
    row |= {
        "budget_bytes": budget,
        "solve_seconds": time.perf_counter() - begin,
        "options_seconds": parts.get("options", 0.0),
        "solver": "cp-sat per block, rotor over the chain",
    }
    if model is not None:
        row["options"] = sum(len(found) for found in model.options.values())
        row["classes"] = len(model.options)
    if steps is None:
        raise Outcome("infeasible", "no schedule of the chain fits", **row)
    found = make_plan(problem, steps, budget, point["strategy"])
    bound = lower_bound(problem, budget, cuts=2)
    least = problem.base_time_ms + (bound or 0.0)
    return row | {
        "predicted_peak_bytes": found.peak_bytes,
        "planned_overhead_percent": 100 * found.overhead,
        "gap_percent": 100 * max(0.0, found.time_ms / least - 1),
    }


def planning(point: Point, device: str, warmup: int, repeats: int) -> Row:
    """Time one planner: "rockmate", "rotor" (the package, on a chain) or "checkmate <backend>"."""
    case = case_of(point["network"], point["size"], point["batch"], point["seed"])
    if point["strategy"] == "rotor":
        return _planning_rotor(case, point, device)
    problem, row = problem_of(case, device, "measured")
    row["budget_bytes"] = budget = budget_of(point["budget"], row["plain_peak_bytes"])
    if point["strategy"] == "rockmate":
        begin = time.perf_counter()
        found = plan(problem, budget, effort="fast")
        row["solve_seconds"] = time.perf_counter() - begin
        overhead, bound, row["solver"] = found.overhead_ms, found.gap, found.planner
        row["gap_percent"] = None if bound is None else 100 * bound
        row["predicted_peak_bytes"] = found.peak_bytes
    else:
        _, _, backend = point["strategy"].partition(" ")
        limit = CHECKMATE_LIMIT_S[point["size"]]
        result = solve_ilp(problem, budget, backend=backend or "cbc", time_limit_s=limit)
        row |= {"solve_seconds": result.seconds, "solver": f"{backend or 'cbc'}: {result.status}"}
        if result.steps is None:
            status = "infeasible" if result.status == "infeasible" else "timeout"
            raise Outcome(status, f"{result.status} after {result.seconds:.0f} s", **row)
        overhead = result.objective or 0.0
        row["predicted_peak_bytes"] = simulate(problem, result.steps).peak_bytes
    row["planned_overhead_percent"] = 100 * overhead / problem.base_time_ms
    return row


def _planning_rotor(case: Case, point: Point, device: str) -> Row:
    place = torch.device(device)
    ready = on_device(case, place)
    plain_peak = meter.trace_memory(lambda: ready.model(*ready.sample).backward(), place)
    module = rotor.Checkpointable(sequential(ready, ready.model))
    begin = time.perf_counter()
    module.measure(ready.sample[0])
    prepared = time.perf_counter()
    budget = budget_of(point["budget"], plain_peak.peak_bytes)
    row: Row = {
        "prepare_seconds": prepared - begin,
        "nodes": len(module.chain),
        "plain_peak_bytes": plain_peak.peak_bytes,
        "budget_bytes": budget,
    }
    try:
        schedule = module.compute_sequence(budget, intervals=False)
    except rotor.InfeasibleBudgetError as error:
        row["solve_seconds"] = time.perf_counter() - prepared
        raise Outcome("infeasible", str(error), **row) from error
    return row | {
        "solve_seconds": time.perf_counter() - prepared,
        "solver": schedule.method,
        "predicted_peak_bytes": module.get_expected_memory(),
        "planned_overhead_percent": 100 * (schedule.makespan_ms / least_ms(module.chain) - 1),
    }
