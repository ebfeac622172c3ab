"""The compact 0/1 program, through PuLP: CBC, HiGHS, Gurobi.

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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rockmate.errors import SolverError, SolverUnavailableError
from rockmate.problems.problem import Problem
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
    program = _ZeroOneProgram(problem, budget_bytes)
    if program.hopeless:
        return SolverResult("infeasible", seconds=time.perf_counter() - begin)
    if backend == "highs":
        status, values = _run_highs(program.lp, time_limit_s)
    else:
        status, values = _run_pulp(program, backend, time_limit_s)
    seconds = time.perf_counter() - begin
    if values is None:
        # CBC also says "infeasible" if its time limit ends before it has found a solution.
        ended = time_limit_s is not None and seconds >= time_limit_s
        return SolverResult("unknown" if ended else status, seconds=seconds)
    steps = program.read(values)
    cost = recomputed_ms(problem, steps)
    return SolverResult(status, steps, cost, cost if status == "optimal" else None, seconds)


class _ZeroOneProgram:
    """The linear program; expressions are kept as (constant, {variable: coefficient})."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        pulp = import_pulp()
        self.pulp = pulp
        self.problem = problem
        self.budget = budget_bytes
        self.count = len(problem.nodes)
        self.width = self.count + 1
        self.stage = stages_of(problem)
        self.last = last_useful_stages(problem)
        self.hopeless = False
        self.lp = pulp.LpProblem("rematerialization", pulp.LpMinimize)
        self.names = 0
        self.rows = 0
        self.R: dict[tuple[int, int], Any] = {
            (s, k): self._binary(f"R_{s}_{k}")
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
        times = [node.fwd_time_ms for node in problem.nodes]
        self.lp.setObjective(pulp.LpAffineExpression({x: times[k] for (_, k), x in self.R.items()}))

    def _binary(self, name: str) -> Any:
        if hasattr(self.lp, "add_variable"):  # PuLP 3.3 and newer
            return self.lp.add_variable(name, cat="Binary")
        return self.pulp.LpVariable(name, cat="Binary")

    def _add(self, terms: dict[Any, int], sense: int, right: int) -> None:
        expression = self.pulp.LpAffineExpression(terms)
        self.rows += 1
        if sense == self.pulp.LpConstraintLE:
            self.lp += expression <= right
        elif sense == self.pulp.LpConstraintGE:
            self.lp += expression >= right
        else:
            self.lp += expression == right

    def _count(self, moment: int, variable: Any, size: int) -> None:
        row = self.terms[moment]
        row[variable] = row.get(variable, 0) + size

    def _add_phantoms(self) -> None:
        """[Constraint] One run of a node makes its phantoms, which then live to its backward."""
        pulp, problem = self.pulp, self.problem
        for k in range(self.count):
            if not problem.phantom_masks[k]:
                continue
            size = problem.bytes_of(problem.phantom_masks[k])
            end = self.stage[k] * self.width + self.count
            makers = [(0, k)] + [(s, k) for s in range(1, self.last[k] + 1)]
            makers = [key for key in makers if key[0] <= self.stage[k]]
            for key in makers:
                self.Q[key] = self._binary(f"Q_{key[0]}_{k}")
                if key[0]:
                    self._add({self.Q[key]: 1, self.R[key]: -1}, pulp.LpConstraintLE, 0)
                begin = key[0] * self.width + k
                for t in self.constant:
                    if begin < t <= end:
                        self._count(t, self.Q[key], size)
            self._add({self.Q[key]: 1 for key in makers}, pulp.LpConstraintEQ, 1)
            for key in makers[1:]:
                # The last run before the backward makes them: a later one would replace them.
                earlier = {self.Q[other]: 1 for other in makers if other[0] < key[0]}
                self._add({**earlier, self.R[key]: 1}, pulp.LpConstraintLE, 1)

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
        pulp, width = self.pulp, self.width
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
                self.names += 1
                alive = self._binary(f"X_{index}_{self.names}")
            before: dict[Any, int] = {}
            room = 0
            for term in (previous, made):
                if isinstance(term, int):
                    room += term
                elif term is not None:
                    before[term] = before.get(term, 0) - 1
            if isinstance(alive, int):
                if not room:
                    self._add(before, pulp.LpConstraintLE, -1)
            elif not room:
                self._add({alive: 1, **before}, pulp.LpConstraintLE, 0)
            if kind == "read" and run is not None:
                self._add({alive: 1, run: -1}, pulp.LpConstraintGE, 0)
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
        pulp, width = self.pulp, self.width
        for k, node in enumerate(self.problem.nodes):
            size, last = node.rerun_state_bytes, self.last[k]
            if not size or not last:
                continue
            later = {s: self._binary(f"U_{s}_{k}") for s in range(1, last + 1)}
            for s in range(1, last + 1):
                self._add({later[s]: 1, self.R[s, k]: -1}, pulp.LpConstraintGE, 0)
                if s < last:
                    self._add({later[s]: 1, later[s + 1]: -1}, pulp.LpConstraintGE, 0)
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
                self._add(terms, self.pulp.LpConstraintLE, room)
            elif room < 0:
                self.hopeless = True

    def read(self, values: dict[str, float]) -> Any:
        """Return the steps of a solution."""
        stages: dict[int, list[int]] = {}
        for (s, k), variable in self.R.items():
            if values.get(variable.name, 0.0) > 0.5:
                stages.setdefault(s, []).append(k)
        return steps_of_stages(self.problem, stages)


def import_pulp() -> Any:
    """Import PuLP without highspy: with highspy loaded, ortools could not be imported."""
    hidden = "highspy" not in sys.modules
    if hidden:
        sys.modules["highspy"] = None  # type: ignore[assignment]
    try:
        import pulp
    finally:
        if hidden:
            del sys.modules["highspy"]
    return pulp


def _cbc(pulp: Any, time_limit_s: float | None) -> Any:
    """Return CBC: the one that comes with PuLP 3, else the one on the search path."""
    bundled = getattr(pulp, "PULP_CBC_CMD", None)
    path = getattr(bundled, "pulp_cbc_path", None)
    # CPU seconds, so that the work does not depend on other processes.
    solver = pulp.COIN_CMD(
        path=path, msg=False, timeLimit=time_limit_s, timeMode="cpu", gapRel=0.0, threads=1
    )
    if not solver.available():
        raise SolverUnavailableError(
            "ILP backend 'cbc' needs the CBC program, which this PuLP does not bring. Use another "
            "backend, or: pip install 'pulp[cbc]'"
        )
    return solver


def _run_pulp(
    program: _ZeroOneProgram, backend: str, time_limit_s: float | None
) -> tuple[Status, dict[str, float] | None]:
    pulp = import_pulp()
    lp = program.lp
    if backend == "gurobi":
        solver = pulp.GUROBI(msg=False, timeLimit=time_limit_s, gapRel=0.0)
    else:
        solver = _cbc(pulp, time_limit_s)
    try:
        lp.solve(solver)
    except Exception as error:
        text = str(error)
        if backend == "gurobi" and "licen" in text.lower():
            raise SolverUnavailableError(
                f"ILP backend 'gurobi' refused a program of {len(lp.variables())} variables and "
                f"{program.rows} rows: {text}. The licence that comes with gurobipy covers "
                f"small programs only; install a full Gurobi licence, or use backend='cp-sat'"
            ) from error
        raise SolverError(f"ILP backend {backend!r} failed: {text}") from error
    # With CBC LpStatus is "Optimal" even after its time limit; only sol_status tells.
    if lp.sol_status == pulp.LpSolutionOptimal:
        status: Status = "optimal"
    elif lp.sol_status == pulp.LpSolutionIntegerFeasible:
        status = "feasible"
    elif lp.status == pulp.LpStatusInfeasible:
        return "infeasible", None
    else:
        return "unknown", None
    return status, {v.name: v.value() or 0.0 for v in lp.variables()}


# Without a gap, what HiGHS calls optimal is; with one thread and a seed it finds the same again.
_HIGHS = "output_flag=false, threads=1, random_seed=0, mip_rel_gap=0.0"


def _run_highs(lp: Any, time_limit_s: float | None) -> tuple[Status, dict[str, float] | None]:
    """Solve with the HiGHS that ortools brings: highspy and ortools cannot share a process."""
    model_builder = importlib.import_module("ortools.linear_solver.python.model_builder")
    solver = model_builder.Solver("HIGHS")
    if not solver.solver_is_supported():
        raise SolverUnavailableError(
            "ILP backend 'highs' needs an ortools that brings HiGHS. Use another backend, or: "
            "pip install 'rockmate[highs]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.mps")
        lp.writeMPS(path, rename=False)
        model = model_builder.Model()
        model.import_from_mps_file(path)
    solver.set_solver_specific_parameters(_HIGHS)
    if time_limit_s is not None:
        solver.set_time_limit_in_seconds(time_limit_s)
    found = model_builder.SolveStatus
    answers: dict[Any, Status] = {found.OPTIMAL: "optimal", found.FEASIBLE: "feasible"}
    answers[found.INFEASIBLE] = "infeasible"
    status = answers.get(solver.solve(model), "unknown")
    if status not in ("optimal", "feasible"):
        return status, None
    return status, {v.name: solver.value(v) for v in model.get_variables()}
