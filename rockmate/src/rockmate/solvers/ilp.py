"""The compact 0/1 program, for CBC and HiGHS of ortools, or Gurobi.

Stage 0 is the forward phase. In stage s some nodes are recomputed in order, then the s-th backward
runs. Index ranges: node k, stage s (from 1 to the last in which k can be of use), storage o, event
e (a moment at which o may be made or read).

    R[s, k]   node k is run again in stage s
    Q[s, k]   that run makes the phantoms of k (s = 0: its first forward does)
    X[o, e]   storage o is alive up to and during its event e, since the event before
    U[s, k]   node k is run again in stage s or later: its rerun state is alive

    [read]     X[o, e] = 1 at a backward that reads o;  X[o, e] >= R[s, u] at a run of reader u
    [keep]     X[o, e+1] <= X[o, e], plus R[s, k] where event e is a run of the producer
    [phantom]  the sum of Q[s, k] up to the backward of k is 1;  Q[s, k] <= R[s, k];
               it is the last run before that backward: sum of Q[s', k], s' < s, <= 1 - R[s, k]
    [state]    U[s, k] >= R[s, k] and U[s, k] >= U[s+1, k]
    [memory]   at every step: what is alive, gradients, rerun states and its own peak <= budget

Unlike the programs over all pairs of compute nodes (Checkmate, Jain et al. 2020; Rockmate, Zhao et
al. 2023) this one has no creation or deletion variables and no big-M. X is declared binary although
it would be integral anyway, because the solvers' cuts then make it faster by two orders of
magnitude. Problems of up to about 20 nodes take fractions of a second; from 40 on, use retention
intervals.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rockmate.errors import SolverError, SolverUnavailableError
from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Steps
from rockmate.solvers.bound import heard_interrupts
from rockmate.solvers.result import (
    SolverResult,
    Status,
    last_useful_stages,
    recomputed_ms,
    stages_of,
    steps_of_stages,
)


def check_installed(backend: str) -> None:
    """Refuse a backend whose library is not installed; nothing is loaded.

    Raises:
        SolverUnavailableError: the library is not installed.
    """
    if backend == "gurobi" and importlib.util.find_spec("gurobipy") is None:
        raise SolverUnavailableError(
            "ILP backend 'gurobi' needs gurobipy, which is not installed. Use another backend, "
            "or: pip install 'rockmate[gurobi]'"
        )


def solve_ilp(
    problem: Problem, budget_bytes: int, *, backend: str = "cbc", time_limit_s: float | None = None
) -> SolverResult:
    """Return the steps of least overhead within the budget, for schedules in node order.

    Raises:
        SolverUnavailableError: the backend is not installed, or its licence is too small.
        SolverError: the backend stopped for another reason.
    """
    check_installed(backend)
    begin = time.perf_counter()
    program = _ZeroOneProgram(problem, budget_bytes, _new_solver(backend))
    if program.hopeless:
        return SolverResult("infeasible", seconds=time.perf_counter() - begin)
    run = _run_gurobi if backend == "gurobi" else _run
    status, value_of = run(program.solver, time_limit_s)
    seconds = time.perf_counter() - begin
    if status not in ("optimal", "feasible"):
        # CBC also says "infeasible" if its time limit ends before it has found a solution.
        ended = time_limit_s is not None and seconds >= time_limit_s
        return SolverResult("unknown" if ended else status, seconds=seconds)
    steps = program.read(value_of)
    return SolverResult(status, steps, recomputed_ms(problem, steps), seconds)


class _ZeroOneProgram:
    """The linear program, in a solver of ortools."""

    def __init__(self, problem: Problem, budget_bytes: int, solver: Any) -> None:
        self.solver = solver
        self.problem = problem
        self.budget = budget_bytes
        self.count = len(problem.nodes)
        self.width = self.count + 1
        self.stage = stages_of(problem)
        self.last = last_useful_stages(problem)
        self.hopeless = False
        self.R: dict[tuple[int, int], Any] = {
            (s, k): solver.BoolVar(f"R_{s}_{k}")
            for k in range(self.count)
            for s in range(1, self.last[k] + 1)
        }
        self.Q: dict[tuple[int, int], Any] = {}
        # bytes at each moment at which a step runs or may run
        moments = [*range(self.count)]
        moments += [s * self.width + k for s, k in self.R]
        moments += [s * self.width + self.count for s in self.stage.values()]
        self.constant = dict.fromkeys(sorted(moments), 0)
        self.terms: dict[int, dict[Any, int]] = {t: {} for t in self.constant}
        self._add_phantoms()
        self._add_storages()
        self._add_states()
        self._add_peaks()
        self._add_memory()
        for (_, k), run in self.R.items():
            solver.Objective().SetCoefficient(run, problem.nodes[k].fwd_time_ms)
        solver.Objective().SetMinimization()

    def _row(self, terms: dict[Any, int], *, least: float = -math.inf, most: float) -> None:
        """Add the row `least <= sum of terms <= most`, of factors by variable."""
        row = self.solver.Constraint(least, most)
        for variable, factor in terms.items():
            row.SetCoefficient(variable, factor)

    def _count(self, moment: int, variable: Any, size: int) -> None:
        row = self.terms[moment]
        row[variable] = row.get(variable, 0) + size

    def _add_phantoms(self) -> None:
        """[Constraint] One run of a node makes its phantoms, which then live to its backward."""
        problem = self.problem
        for k in range(self.count):
            if not problem.phantom_masks[k]:
                continue
            size = problem.bytes_of(problem.phantom_masks[k])
            end = self.stage[k] * self.width + self.count
            makers = [(0, k)] + [(s, k) for s in range(1, self.last[k] + 1)]
            makers = [key for key in makers if key[0] <= self.stage[k]]
            for key in makers:
                self.Q[key] = self.solver.BoolVar(f"Q_{key[0]}_{k}")
                if key[0]:
                    self._row({self.Q[key]: 1, self.R[key]: -1}, most=0)
                begin = key[0] * self.width + k
                for t in self.constant:
                    if begin < t <= end:
                        self._count(t, self.Q[key], size)
            self._row({self.Q[key]: 1 for key in makers}, least=1, most=1)
            for key in makers[1:]:
                # The last run before the backward makes them: a later one would replace them.
                earlier = {self.Q[other]: 1 for other in makers if other[0] < key[0]}
                self._row({**earlier, self.R[key]: 1}, most=1)

    def _add_storages(self) -> None:
        for index, storage in enumerate(self.problem.storages):
            if storage.is_output:
                for t in self.constant:
                    if t > storage.producer:
                        self.constant[t] += storage.size_bytes
            elif not storage.is_phantom:
                self._add_storage(index)

    def _add_storage(self, index: int) -> None:
        """[Constraint] Read and keep, along the events of one storage."""
        width = self.width
        storage = self.problem.storages[index]
        k = storage.producer
        # moment, kind, run variable (None: the event is certain)
        events: list[tuple[int, str, Any]] = [(u, "read", None) for u in storage.fwd_users]
        for u in storage.fwd_users:
            events += [(s * width + u, "read", self.R[s, u]) for s in range(1, self.last[u] + 1)]
        events += [(self.stage[u] * width + self.count, "read", None) for u in storage.bwd_users]
        events += [(s * width + k, "make", self.R[s, k]) for s in range(1, self.last[k] + 1)]
        events.sort(key=lambda event: event[0])
        previous: Any = 1  # alive after the event before: 1, or a variable
        made: Any = None  # the event before was a run of the producer
        begin = k
        moments = list(self.constant)
        for moment, kind, run in events:
            if kind == "read" and run is None:
                alive: Any = 1
            else:
                alive = self.solver.BoolVar(f"X_{index}_{self.solver.NumVariables()}")
            before: dict[Any, int] = {}
            room = 0
            for term in (previous, made):
                if isinstance(term, int):
                    room += term
                elif term is not None:
                    before[term] = before.get(term, 0) - 1
            if isinstance(alive, int):
                if not room:
                    self._row(before, most=-1)
            elif not room:
                self._row({alive: 1, **before}, most=0)
            if kind == "read" and run is not None:
                self._row({run: 1, alive: -1}, most=0)
            for t in moments:
                if begin < t <= moment:
                    if isinstance(alive, int):
                        self.constant[t] += storage.size_bytes
                    else:
                        self._count(t, alive, storage.size_bytes)
            previous, begin = alive, moment
            made = run if kind == "make" else None

    def _add_states(self) -> None:
        """[Constraint] A rerun state lives from the first forward to the last."""
        width = self.width
        for k, node in enumerate(self.problem.nodes):
            size, last = node.rerun_state_bytes, self.last[k]
            if not size or not last:
                continue
            later = {s: self.solver.BoolVar(f"U_{s}_{k}") for s in range(1, last + 1)}
            for s in range(1, last + 1):
                self._row({self.R[s, k]: 1, later[s]: -1}, most=0)
                if s < last:
                    self._row({later[s + 1]: 1, later[s]: -1}, most=0)
            for t in self.constant:
                stage = t // width + (1 if t % width > k else 0)
                if t >= k and (stage <= last or t < width):
                    self._count(t, later[1 if t < width else stage], size)

    def _add_peaks(self) -> None:
        """Add what each step alone needs, and the gradients of its stage."""
        problem, width = self.problem, self.width
        for node, s in self.stage.items():
            row = problem.nodes[node]
            for k in range(self.count):
                if (s, k) in self.R:
                    self.constant[s * width + k] += row.grads_before_bytes
            self.constant[s * width + self.count] += row.grads_before_bytes + row.bwd_peak_bytes
        for k in range(self.count):
            plain, recording = problem.forward_peaks_nograd[k], problem.forward_peaks[k]
            first_records = not problem.phantom_masks[k]
            self.constant[k] += recording if first_records else plain
            for s in range(self.last[k] + 1):
                t = s * width + k
                if s:
                    self._count(t, self.R[s, k], plain)
                if (s, k) in self.Q and recording != plain:
                    self._count(t, self.Q[s, k], recording - plain)

    def _add_memory(self) -> None:
        """[Constraint] At every moment, live storages fit into the budget."""
        for t, terms in self.terms.items():
            room = self.budget - self.constant[t]
            if terms:
                self._row(terms, most=room)
            elif room < 0:
                self.hopeless = True

    def read(self, value_of: Callable[[Any], float]) -> Steps:
        """Return the steps of a solution, which gives each variable a value."""
        stages: dict[int, list[int]] = {}
        for (s, k), variable in self.R.items():
            if value_of(variable) > 0.5:
                stages.setdefault(s, []).append(k)
        return steps_of_stages(self.problem, stages)


# Quiet, and the same again: one thread, and a seed.
_HIGHS = "output_flag=false, threads=1, random_seed=0, mip_rel_gap=0.0"


def _new_solver(backend: str) -> Any:
    """Return a solver of ortools; Gurobi gets its program as a file."""
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("CBC" if backend == "gurobi" else backend.upper())
    if solver is None:
        raise SolverUnavailableError(
            f"ILP backend {backend!r} needs an ortools that brings it. Use another backend, or: "
            "pip install 'rockmate[highs]'"
        )
    if backend == "highs":
        solver.SetSolverSpecificParametersAsString(_HIGHS)
    return solver


def _run(solver: Any, time_limit_s: float | None) -> tuple[Status, Callable[[Any], float]]:
    """Solve in this process, and return how to read a variable; without a gap, optimal is."""
    from ortools.linear_solver import pywraplp

    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, 0.0)
    if time_limit_s is not None:
        solver.SetTimeLimit(int(1000 * time_limit_s))
    answers: dict[int, Status] = {
        solver.OPTIMAL: "optimal",
        solver.FEASIBLE: "feasible",
        solver.INFEASIBLE: "infeasible",
    }
    with heard_interrupts():
        status = answers.get(solver.Solve(parameters), "unknown")
    return status, lambda variable: variable.solution_value()


def _run_gurobi(solver: Any, time_limit_s: float | None) -> tuple[Status, Callable[[Any], float]]:
    import gurobipy

    options = {"OutputFlag": 0, "MIPGap": 0.0}
    if time_limit_s is not None:
        options["TimeLimit"] = time_limit_s
    try:
        with tempfile.TemporaryDirectory() as folder, gurobipy.Env(params=options) as env:
            path = Path(folder) / "program.mps"
            path.write_text(solver.ExportModelAsMpsFormat(False, False))
            with gurobipy.read(str(path), env) as model:
                model.optimize()
                code, found = model.Status, model.SolCount
                values = {v.VarName: v.X for v in model.getVars()} if found else {}
    except gurobipy.GurobiError as error:
        if "licen" not in str(error).lower():
            raise SolverError(f"ILP backend 'gurobi' failed: {error}") from error
        raise SolverUnavailableError(
            f"ILP backend 'gurobi' refused a program of {solver.NumVariables()} variables and "
            f"{solver.NumConstraints()} rows: {error}. The licence that comes with gurobipy covers "
            "small programs only; install a full Gurobi licence, or use backend='cp-sat'"
        ) from error
    infeasible: Status = "infeasible" if code == gurobipy.GRB.INFEASIBLE else "unknown"
    status: Status = "optimal" if code == gurobipy.GRB.OPTIMAL else "feasible"
    return status if found else infeasible, lambda variable: values[variable.name()]
