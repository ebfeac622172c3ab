"""All backends agree wherever they finish; what is missing is said."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from rockmate.errors import SolverUnavailableError
from rockmate.planners import plan
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers import BACKENDS, solve_whole
from rockmate.solvers.ilp import solve_ilp
from rockmate.solvers.intervals.solve import solve_intervals
from zoo.problems import gpt_problem, random_problem

MODULES = {"cp-sat": "ortools", "cbc": "ortools", "highs": "ortools", "gurobi": "gurobipy"}


def require(backend: str) -> None:
    if importlib.util.find_spec(MODULES[backend]) is None:
        pytest.skip(f"{MODULES[backend]} is not installed")


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "cp-sat"])
def test_agrees_with_intervals(backend: str) -> None:
    require(backend)
    for seed in range(200, 212):
        problem = random_problem(seed, 6)
        budget = int(0.7 * simulate(problem, no_recomputation(problem)).peak_bytes)
        reference = solve_intervals(problem, budget, max_runs=9)
        result = solve_ilp(problem, budget, backend=backend)
        assert result.status == reference.status
        if result.steps is not None:
            assert result.objective == pytest.approx(reference.objective)
            simulate(problem, result.steps, budget_bytes=budget)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_of_a_gpt(backend: str) -> None:
    require(backend)
    problem = gpt_problem(1)
    budget = int(0.8 * simulate(problem, no_recomputation(problem)).peak_bytes)
    result = solve_whole(problem, budget, backend=backend, deterministic_limit=3.0)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(8.2513216)


@pytest.mark.gurobi
def test_a_licence_that_is_too_small_is_named() -> None:
    require("gurobi")
    problem = gpt_problem(4)
    budget = int(0.8 * simulate(problem, no_recomputation(problem)).peak_bytes)
    with pytest.raises(SolverUnavailableError, match="licence"):
        solve_ilp(problem, budget, backend="gurobi", time_limit_s=5)


@pytest.mark.parametrize("backend", ["highs", "gurobi"])
def test_a_missing_backend_names_the_extra(backend: str, monkeypatch) -> None:
    from ortools.linear_solver import pywraplp

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pywraplp.Solver, "CreateSolver", lambda name: None)
    problem = random_problem(1, 4)
    budget = int(0.8 * simulate(problem, no_recomputation(problem)).peak_bytes)
    with pytest.raises(SolverUnavailableError, match=rf"pip install 'rockmate\[{backend}\]'"):
        solve_ilp(problem, budget, backend=backend)


def test_highs_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints its name, which ortools' own switch leaves on."""
    problem = random_problem(1, 4)
    budget = int(0.8 * simulate(problem, no_recomputation(problem)).peak_bytes)
    solve_ilp(problem, budget, backend="highs")
    assert capfd.readouterr() == ("", "")


def test_an_unknown_backend_is_refused() -> None:
    problem = gpt_problem(1)
    budget = int(0.8 * simulate(problem, no_recomputation(problem)).peak_bytes)
    with pytest.raises(ValueError, match="backend 'glpk' is unknown; choose one of cp-sat, cbc"):
        plan(problem, budget, backend="glpk")


LOADED = """
import sys, json
before = set(sys.modules)
import {modules}
heavy = ("ortools", "rotor", "gurobipy", "highspy")
print(json.dumps(sorted(m for m in heavy if m in sys.modules)))
"""

PLANNING = (
    "rockmate.problems.problem",
    "rockmate.schedules.simulate",
    "rockmate.schedules.liveness",
    "rockmate.schedules.report",
    "rockmate.solvers.ilp",
    "rockmate.solvers.intervals.solve",
    "rockmate.solvers.bound",
    "rockmate.planners",
)


def loaded_by(modules: str) -> list[str]:
    code = LOADED.format(modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_importing_the_planners_loads_no_solver() -> None:
    assert loaded_by(", ".join(PLANNING)) == []


def test_the_import_test_can_fail() -> None:
    assert "ortools" in loaded_by("ortools")
