"""Retention intervals on CP-SAT: the default solver of blocks, whole graphs and windows of a plan.

Time is a line of integers. With n nodes and W = n + 1, the first forward of node k is at time k;
stage s (the recomputations before the s-th backward, then that backward) covers [s*W, (s+1)*W):
node k can be run again at s*W + k, and the backward is at s*W + n. So recomputations of one stage
keep the order of the nodes, and each node runs at most once per stage.

* run i of node k: run 0 is fixed; later runs are optional, with a stage to be chosen;
* storage o of run i: an interval from the run's start to a free end, present with the run; a run
  replaces what earlier runs of its node made, so their intervals end before it;
* a reader at time t needs one run of the producer that starts before t and whose interval ends
  after t; a phantom has its producer's backward as reader, and exactly one run makes it;
* all intervals, the workspace of each step, the gradients of each stage and the rerun states share
  one cumulative resource: the budget.

The number of variables is O(n · runs), not O(n²) as in the programs over time × nodes. After
MOCCASIN (Bartan et al. 2023), with the backward order fixed, phantoms, workspaces and rerun state.

A *window* frees only some nodes, in some stages, around an incumbent: everything else is a fixed
background. That is how plans of networks too large for one model are improved.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any

from rockmate.problem import Problem
from rockmate.solvers.result import (
    SolverResult,
    Status,
    last_useful_stages,
    recomputed_by_stage,
    recomputed_ms,
    stages_of,
    steps_of_stages,
)
from rockmate.steps import Steps

_COST_RANGE = 10_000_000  # integer costs add up to about this
_UNITS = 1 << 20  # memory is counted in at most so many units of the budget


@dataclass(frozen=True, slots=True)
class Window:
    """The part of an incumbent that may change: these nodes, in stages `first` to `last`."""

    steps: Steps
    nodes: frozenset[int]
    first_stage: int
    last_stage: int


def solve_intervals(
    problem: Problem,
    budget_bytes: int,
    *,
    max_runs: int = 3,
    objective: str = "time",
    hint: Steps | None = None,
    window: Window | None = None,
    deterministic_limit: float = 5.0,
    wall_limit_s: float | None = None,
    workers: int = 1,
    relative_gap: float = 0.0,
    linearization: int = 0,
    seed: int = 0,
) -> SolverResult:
    """Return the best steps found whose peak is at most the budget.

    Deterministic with one worker and no wall-clock limit: `deterministic_limit` counts work, one
    unit being about a second. `objective="peak"` minimises the peak below the budget instead of
    the time. With more than one worker results can differ between runs.
    """
    from ortools.sat.python import cp_model

    begin = time.perf_counter()
    model = _Model(problem, budget_bytes, max_runs, objective, window, hint)
    if model.hopeless:
        return SolverResult("infeasible", seconds=time.perf_counter() - begin)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = workers
    parameters.random_seed = seed
    # These programs are small and many: most of the time went into presolve, and linear relaxation
    # is a loss since workspaces and phantoms are in the model (2.7 times and 4 times on blocks).
    parameters.linearization_level = linearization
    parameters.cp_model_probing_level = 0
    parameters.symmetry_level = 0
    parameters.max_presolve_iterations = 1
    parameters.max_deterministic_time = deterministic_limit
    parameters.relative_gap_limit = relative_gap
    if wall_limit_s is not None:
        parameters.max_time_in_seconds = max(0.05, wall_limit_s)
    code = solver.solve(model.cp)
    seconds = time.perf_counter() - begin
    if code == cp_model.INFEASIBLE:
        return SolverResult("infeasible", seconds=seconds)
    if code not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SolverResult("unknown", seconds=seconds)
    found = model.read(solver)
    status: Status = "optimal" if code == cp_model.OPTIMAL else "feasible"
    value = model.to_objective(solver.objective_value)
    bound = model.to_objective(solver.best_objective_bound)
    if objective == "time":
        value = recomputed_ms(problem, found)  # exact, where the program's costs are rounded
        bound = value if status == "optimal" else min(bound, value)
    return SolverResult(status, found, value, bound, seconds)


@dataclass(slots=True, eq=False)
class _Run:
    """One run of a node: at a fixed time, or optional with a start to be chosen."""

    start: Any  # int or variable
    present: Any = None  # None: always
    earliest: int = 0
    latest: int = 0
    records: Any = None  # variable; None: follows from the node and the run

    @property
    def fixed(self) -> bool:
        return self.present is None


@dataclass(slots=True, eq=False)
class _Kept:
    """The interval of one storage made by one run."""

    run: _Run
    end: Any
    present: Any  # None: always
    uses: list[int] = field(default_factory=list)  # hinted


class _Model:
    """Builds the constraint program; every `_add_…` method adds one family of constraints."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        max_runs: int,
        objective: str,
        window: Window | None,
        hint: Steps | None,
    ) -> None:
        from ortools.sat.python import cp_model

        self.problem = problem
        self.cp = cp_model.CpModel()
        self._domain = cp_model.Domain.from_values
        self.count = len(problem.nodes)
        self.width = self.count + 1
        self.stage = stages_of(problem)
        self.stages = len(self.stage)
        self.horizon = (self.stages + 1) * self.width
        self.minimise_peak = objective == "peak"
        self.window = window
        self.unit = _unit_bytes(problem, budget_bytes)
        self.capacity = budget_bytes // self.unit
        self.last_useful = last_useful_stages(problem)
        self.fixed_stages: dict[int, list[int]] = {}
        if window is not None:
            hint = window.steps
            self.fixed_stages = self._by_node(window.steps)
        self.hinted = self._by_node(hint) if hint is not None else None
        self.demands: list[tuple[Any, int]] = []  # intervals on the memory resource
        self.fixed_demand: dict[int, int] = {}  # bytes at each time where a fixed step runs
        self.runs: list[list[_Run]] = [self._runs_of(k, max_runs) for k in range(self.count)]
        self.open = [any(not run.fixed for run in runs) for runs in self.runs]
        self._add_storages()
        self._add_workspaces()
        self._add_background()
        self.hopeless = any(demand > self.capacity for demand in self.fixed_demand.values())
        self._add_capacity()
        self._add_objective()

    # --- runs -------------------------------------------------------------------------------------

    def _by_node(self, steps: Steps) -> dict[int, list[int]]:
        stages: dict[int, list[int]] = {}
        for stage, nodes in recomputed_by_stage(self.problem, steps).items():
            for node in sorted(set(nodes)):
                stages.setdefault(node, []).append(stage)
        return stages

    def _runs_of(self, k: int, max_runs: int) -> list[_Run]:
        window = self.window
        first, last = 1, self.last_useful[k]
        before: list[int] = []
        behind: list[int] = []
        own = self.fixed_stages.get(k, [])
        if window is not None:
            first, last = max(first, window.first_stage), min(last, window.last_stage)
            if k not in window.nodes:
                first, last = 1, 0
            if last < first:
                before = own
            else:
                before = [s for s in own if s < first]
                behind = [s for s in own if s > last]
                max_runs = max(max_runs, 1 + len(own) - len(before) - len(behind))
        runs = [_Run(t, None, t, t) for t in (k, *(s * self.width + k for s in before))]
        hinted: list[int] = []
        if self.hinted is not None:
            hinted = [s for s in self.hinted.get(k, []) if first <= s <= last]
        previous: _Run | None = None
        for i in range(min(max_runs - 1, last - first + 1)):
            present = self.cp.new_bool_var("")
            times = [s * self.width + k for s in range(first + i, last + 1)]
            start = self.cp.new_int_var_from_domain(self._domain(times), "")
            run = _Run(start, present, times[0], times[-1])
            if previous is not None:
                # [Constraint] optional runs are used in order
                self.cp.add_implication(present, previous.present)
                self.cp.add(start > previous.start).only_enforce_if(present)
            if self.hinted is not None:
                self.cp.add_hint(present, i < len(hinted))
                if i < len(hinted):
                    self.cp.add_hint(start, hinted[i] * self.width + k)
            runs.append(run)
            previous = run
        runs += [_Run(t, None, t, t) for t in (s * self.width + k for s in behind)]
        return runs

    # --- storages ---------------------------------------------------------------------------------

    def _add_storages(self) -> None:
        """Intervals of the storages that can change, and the demands of those that cannot."""
        problem = self.problem
        self.background: list[tuple[int, int, int]] = []  # from, to (exclusive), bytes
        for k in range(self.count):
            phantoms = [i for i in problem.products[k] if problem.storages[i].is_phantom]
            if phantoms:
                self._add_phantom(k, sum(problem.sizes[i] for i in phantoms))
            for index in problem.products[k]:
                storage = problem.storages[index]
                if storage.is_phantom:
                    continue
                if storage.is_output:
                    # an output stays to the end; a run that makes it again pays in its workspace
                    self.background.append((k, self.horizon, storage.size_bytes))
                elif self.open[k] or any(self.open[u] for u in storage.fwd_users):
                    self._add_storage(index)
                else:
                    self._add_closed_storage(index)

    def _readers(self, index: int) -> list[_Run]:
        """Runs and backwards (as runs at a fixed time) that read a storage."""
        storage = self.problem.storages[index]
        readers = [run for u in storage.fwd_users for run in self.runs[u]]
        for u in storage.bwd_users:
            t = self.stage[u] * self.width + self.count
            readers.append(_Run(t, None, t, t))
        return readers

    def _add_closed_storage(self, index: int) -> None:
        storage = self.problem.storages[index]
        times = sorted(run.start for run in self._readers(index))
        starts = [run.start for run in self.runs[storage.producer]]
        for i, start in enumerate(starts):
            after = starts[i + 1] if i + 1 < len(starts) else self.horizon
            last = max((t for t in times if start < t <= after), default=start)
            # bytes at the making step are counted here, its other workspace in `_add_workspaces`
            self.background.append((start, last + 1, storage.size_bytes))

    def _add_storage(self, index: int) -> None:
        storage = self.problem.storages[index]
        kept = self._intervals(self.runs[storage.producer], storage.size_bytes)
        for reader in self._readers(index):
            self._add_reader(kept, reader)
        self._hint_ends(kept)

    def _add_phantom(self, k: int, size_bytes: int) -> None:
        """[Constraint] exactly one run of the node makes its phantoms, and keeps them till B(k)."""
        backward_time = self.stage[k] * self.width + self.count
        runs = [run for run in self.runs[k] if run.earliest < backward_time]
        if not self.open[k]:
            last = max(run.start for run in runs)
            for run in self.runs[k]:
                run.records = run.start == last
            self.background.append((last, backward_time + 1, size_bytes))
            return
        if len(runs) == 1:
            runs[0].records = True
            self.background.append((k, backward_time + 1, size_bytes))
        hinted = [k, *(s * self.width + k for s in (self.hinted or {}).get(k, []))]
        chosen = max(t for t in hinted if t < backward_time)
        kept: list[_Kept] = []
        for run in self.runs[k]:
            if run not in runs:
                run.records = False
            if run.records is not None:
                continue
            run.records = self.cp.new_bool_var("")
            if run.present is not None:
                self.cp.add_implication(run.records, run.present)
                self.cp.add(run.start < backward_time).only_enforce_if(run.records)
            size = self.cp.new_int_var(1, self.horizon, "")
            interval = self.cp.new_optional_interval_var(
                run.start, size, backward_time + 1, run.records, ""
            )
            self.demands.append((interval, size_bytes))
            kept.append(_Kept(run, backward_time + 1, run.records))
        if not kept:
            return
        self.cp.add_exactly_one([item.present for item in kept])
        for run, following in itertools.pairwise(runs):
            # [Constraint] it is the last run before the backward: a later one would replace them
            literals = [run.records]
            if not following.fixed:
                literals.append(following.present)
            self.cp.add(following.start > backward_time).only_enforce_if(literals)
        if self.hinted is not None:
            times = self._hinted_times(self.runs[k])
            for item in kept:
                self.cp.add_hint(item.present, times.get(id(item.run)) == chosen)

    def _intervals(self, runs: list[_Run], size_bytes: int) -> list[_Kept]:
        """One interval per run, from its start to a free end, before the next run of the node."""
        kept: list[_Kept] = []
        for run in runs:
            end = self.cp.new_int_var(run.earliest + 1, self.horizon, "")
            size = self.cp.new_int_var(1, self.horizon, "")
            if run.fixed:
                interval = self.cp.new_interval_var(run.start, size, end, "")
            else:
                interval = self.cp.new_optional_interval_var(run.start, size, end, run.present, "")
            self.demands.append((interval, size_bytes))
            # [Constraint] a run replaces what the runs before it made
            if run.fixed:
                for item in kept:
                    self.cp.add(item.end <= run.start)
            elif kept:
                self.cp.add(kept[-1].end <= run.start).only_enforce_if(run.present)
            kept.append(_Kept(run, end, run.present))
        return kept

    def _add_reader(self, kept: list[_Kept], reader: _Run) -> None:
        """[Constraint] a reader at time t finds an interval that starts before t and ends after."""
        candidates = [item for item in kept if item.run.earliest < reader.latest]
        if reader.fixed:
            fixed = [item for item in candidates if item.run.fixed]
            latest = max(item.run.start for item in fixed)
            candidates = [
                item for item in candidates if not item.run.fixed or item.run.start == latest
            ]
            candidates = [item for item in candidates if item.run.latest >= latest]
        served = None
        if self.hinted is not None:
            served = self._hinted_server(kept, reader)
        if len(candidates) == 1:
            bound = self.cp.add(candidates[0].end > reader.start)
            if not reader.fixed:
                bound.only_enforce_if(reader.present)
            return
        literals = []
        for item in candidates:
            literal = self.cp.new_bool_var("")
            self.cp.add(item.end > reader.start).only_enforce_if(literal)
            if not item.run.fixed:
                self.cp.add_implication(literal, item.present)
            if item.run.latest >= reader.earliest:
                self.cp.add(item.run.start < reader.start).only_enforce_if(literal)
            literals.append(literal)
            if self.hinted is not None:
                self.cp.add_hint(literal, item is served)
        clause = self.cp.add_bool_or(literals)
        if not reader.fixed:
            clause.only_enforce_if(reader.present)

    # --- hints ------------------------------------------------------------------------------------

    def _hinted_times(self, runs: list[_Run]) -> dict[int, int]:
        """Hinted start of each run (by identity); absent runs are missing."""
        assert self.hinted is not None
        times: dict[int, int] = {}
        node = runs[0].start  # the first run of node k is at time k
        optional = [run for run in runs if not run.fixed]
        for run in runs:
            if run.fixed:
                times[id(run)] = run.start
        if optional:
            hinted = [s * self.width + node for s in self.hinted.get(node, [])]
            inside = [t for t in hinted if optional[0].earliest <= t <= optional[0].latest]
            for run, t in zip(optional, inside, strict=False):
                times[id(run)] = t
        return times

    def _hinted_server(self, kept: list[_Kept], reader: _Run) -> _Kept | None:
        """The interval that serves a reader in the hint; notes the use for the hinted end."""
        time_of = self._times_cache(kept)
        if reader.fixed:
            t = reader.start
        else:
            found = self._reader_time(reader)
            if found is None:
                return None
            t = found
        best = None
        for item in kept:
            start = time_of.get(id(item.run))
            if start is not None and start < t:
                best = item
        if best is not None:
            best.uses.append(t)
        return best

    def _times_cache(self, kept: list[_Kept]) -> dict[int, int]:
        return self._hinted_times([item.run for item in kept])

    def _reader_time(self, reader: _Run) -> int | None:
        node = reader.earliest % self.width
        return self._hinted_times(self.runs[node]).get(id(reader))

    def _hint_ends(self, kept: list[_Kept]) -> None:
        if self.hinted is None:
            return
        time_of = self._times_cache(kept)
        for item in kept:
            start = time_of.get(id(item.run))
            if start is not None:
                self.cp.add_hint(item.end, max([start, *item.uses]) + 1)

    # --- workspaces, gradients, state -----------------------------------------------------------

    def _add_workspaces(self) -> None:
        """What each step needs beyond the storages that it reads and makes."""
        problem = self.problem
        for k in range(self.count):
            node = problem.nodes[k]
            mask = problem.product_masks[k]
            phantom = problem.bytes_of(problem.phantom_masks[k])
            for i, run in enumerate(self.runs[k]):
                made = problem.bytes_of(mask if i == 0 else mask & ~problem.output_mask) - phantom
                recording = problem.forward_peaks[k] - made - phantom
                plain = problem.forward_peaks_nograd[k] - made
                if not problem.phantom_masks[k]:
                    records = i == 0 and node.has_backward
                    self._add_moment(run, None, recording if records else plain)
                elif isinstance(run.records, bool):
                    self._add_moment(run, None, recording if run.records else plain)
                else:
                    self._add_moment(run, run.records, recording)
                    skips = self.cp.new_bool_var("")
                    # [Constraint] a run that is present either records or does not
                    present = 1 if run.present is None else run.present
                    self.cp.add(run.records + skips == present)
                    self._add_moment(run, skips, plain)
            if node.rerun_state_bytes and len(self.runs[k]) > 1:
                self._add_rerun_state(k)

    def _add_moment(self, run: _Run, present: Any, demand: int) -> None:
        """A demand during the single step of a run."""
        if not demand:
            return
        if run.fixed and present is None:
            self.background.append((run.start, run.start + 1, demand))
            return
        if present is None:
            present = run.present
        interval = self.cp.new_optional_fixed_size_interval_var(run.start, 1, present, "")
        self.demands.append((interval, demand))

    def _add_rerun_state(self, k: int) -> None:
        """[Constraint] the rerun state lives from the first run to the last, if they differ."""
        runs = self.runs[k]
        size_bytes = self.problem.nodes[k].rerun_state_bytes
        fixed = [run for run in runs if run.fixed]
        optional = [run for run in runs if not run.fixed]
        if len(fixed) > 1:
            last = max(run.start for run in fixed)
            self.background.append((k, last + 1, size_bytes))
            optional = [run for run in optional if run.latest > last]
            begin = last + 1
        else:
            begin = k
        if not optional:
            return
        end = self.cp.new_int_var(begin + 1, self.horizon, "")
        size = self.cp.new_int_var(1, self.horizon, "")
        interval = self.cp.new_optional_interval_var(begin, size, end, optional[0].present, "")
        self.demands.append((interval, size_bytes))
        for run in optional:
            self.cp.add(end > run.start).only_enforce_if(run.present)

    def _add_background(self) -> None:
        """Everything that is fixed, as the bytes at each moment where a step may run."""
        problem, width = self.problem, self.width
        for node, stage in self.stage.items():
            row = problem.nodes[node]
            self.background.append((stage * width, (stage + 1) * width, row.grads_before_bytes))
            moment = stage * width + self.count
            self.background.append((moment, moment + 1, row.bwd_peak_bytes))
        change: dict[int, int] = {}
        for begin, end, size in self.background:
            change[begin] = change.get(begin, 0) + size
            change[end] = change.get(end, 0) - size
        moments = self._moments()
        level = 0
        position = 0
        borders = sorted(change)
        for moment in moments:
            while position < len(borders) and borders[position] <= moment:
                level += change[borders[position]]
                position += 1
            self.fixed_demand[moment] = self._units(level)
        # merge moments of equal demand; between two moments nothing runs, so nothing is at stake
        merged: list[list[int]] = []
        for moment in moments:
            demand = self.fixed_demand[moment]
            if merged and merged[-1][2] == demand:
                merged[-1][1] = moment + 1
            elif merged and self._is_quiet(merged[-1][0], moment):
                merged[-1][1] = moment + 1
                merged[-1][2] = max(merged[-1][2], demand)
            else:
                merged.append([moment, moment + 1, demand])
        for begin, end, demand in merged:
            if demand:
                interval = self.cp.new_fixed_size_interval_var(begin, end - begin, "")
                self.demands.append((interval, -demand))  # negative: already in units

    def _moments(self) -> list[int]:
        """Times at which a step runs or may run."""
        times = {stage * self.width + self.count for stage in self.stage.values()}
        events: set[int] = set()
        for k, runs in enumerate(self.runs):
            for run in runs:
                if run.fixed:
                    times.add(run.start)
                else:
                    first, last = run.earliest // self.width, run.latest // self.width
                    options = {s * self.width + k for s in range(first, last + 1)}
                    times |= options
                    events |= options
        problem = self.problem
        for index, storage in enumerate(problem.storages):
            producer = storage.producer
            if storage.is_output or storage.is_phantom:
                continue
            if self.open[producer] or any(self.open[u] for u in storage.fwd_users):
                events |= {run.start for run in self.runs[producer] if run.fixed}
                events |= {run.start for run in self._readers(index) if run.fixed}
        for k in range(self.count):
            if self.open[k] and problem.phantom_masks[k]:
                events.add(self.stage[k] * self.width + self.count)
                events |= {run.start for run in self.runs[k] if run.fixed}
        self._event_times = sorted(events)
        return sorted(times)

    def _is_quiet(self, begin: int, end: int) -> bool:
        """Whether no interval of the model can start or end in a span, both ends included."""
        events = self._event_times
        return bisect.bisect_left(events, begin) == bisect.bisect_right(events, end)

    # --- capacity and objective -----------------------------------------------------------------

    def _units(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit)

    def _add_capacity(self) -> None:
        """[Constraint] at every time, what is alive fits into the budget."""
        intervals, sizes = [], []
        for interval, size in self.demands:
            demand = -size if size < 0 else self._units(size)
            if demand:
                intervals.append(interval)
                sizes.append(demand)
        self.peak: Any = self.capacity
        if self.minimise_peak:
            low = max(self.fixed_demand.values(), default=0)
            self.peak = self.cp.new_int_var(min(low, self.capacity), self.capacity, "peak")
        if intervals:
            self.cp.add_cumulative(intervals, sizes, self.peak)

    def _add_objective(self) -> None:
        if self.minimise_peak:
            self.cp.minimize(self.peak)
            return
        times = [node.fwd_time_ms for node in self.problem.nodes]
        self.scale = _COST_RANGE / max(sum(times), 1e-9)
        terms = []
        for k, runs in enumerate(self.runs):
            cost = max(1, round(times[k] * self.scale))
            terms += [cost * run.present for run in runs if not run.fixed]
        self.fixed_cost = sum(
            times[k] * (sum(run.fixed for run in runs) - 1) for k, runs in enumerate(self.runs)
        )
        self.cp.minimize(sum(terms))

    def to_objective(self, value: float) -> float:
        """Return bytes or milliseconds for a value of the program's objective."""
        if self.minimise_peak:
            return value * self.unit
        return self.fixed_cost + value / self.scale

    def read(self, solver: Any) -> Steps:
        """Return the steps of the solution."""
        stages: dict[int, list[int]] = {}
        for k, runs in enumerate(self.runs):
            for run in runs[1:]:
                if run.fixed:
                    stages.setdefault(run.start // self.width, []).append(k)
                elif solver.value(run.present):
                    stages.setdefault(solver.value(run.start) // self.width, []).append(k)
        return steps_of_stages(self.problem, stages)


def _unit_bytes(problem: Problem, budget_bytes: int) -> int:
    """Return the unit in which memory is counted: exact where the numbers stay small."""
    exact = math.gcd(
        *problem.sizes,
        *problem.forward_peaks,
        *problem.forward_peaks_nograd,
        *(node.bwd_peak_bytes for node in problem.nodes),
        *(node.grads_before_bytes for node in problem.nodes),
        *(node.rerun_state_bytes for node in problem.nodes),
    )
    return max(1, exact, budget_bytes // _UNITS)
