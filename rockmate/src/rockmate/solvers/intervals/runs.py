"""When each node of a program over retention intervals may run.

Here are the time axis, the fixed and optional runs of every node, the choices that a window leaves,
and the conversions of steps to a hint and of a solution to steps. See solve.py for the overview.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Steps
from rockmate.solvers.intervals.cp_sat import cp_model
from rockmate.solvers.result import (
    last_useful_stages,
    recomputed_by_stage,
    stages_of,
    steps_of_stages,
)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of an incumbent that may change: these nodes, in stages `first` to `last`."""

    steps: Steps
    nodes: frozenset[int]
    first_stage: int
    last_stage: int


@dataclass(slots=True, eq=False)
class Run:
    """One run of a node: at a fixed time, or optional with a variable start."""

    start: Any  # int or variable
    present: Any = None  # None: always
    earliest: int = 0
    latest: int = 0
    records: Any = None  # variable; None: follows from the node and the run

    @property
    def fixed(self) -> bool:
        return self.present is None


class TimeAxis:
    """The runs of every node: the first is fixed, later ones have a variable stage.

    Time is counted as in `solve`. If there is a window, only nodes and stages inside it have
    optional runs; all other runs of its steps are fixed.
    """

    def __init__(
        self, problem: Problem, cp: Any, max_runs: int, window: Window | None, hint: Steps | None
    ) -> None:
        sat = cp_model()

        self.problem = problem
        self.cp = cp
        self._domain = sat.Domain.from_values
        self.count = len(problem.nodes)
        self.width = self.count + 1
        self.stage = stages_of(problem)
        self.horizon = (len(self.stage) + 1) * self.width
        self._window = window
        self._last_useful = last_useful_stages(problem)
        self._fixed_stages: dict[int, list[int]] = {}
        if window is not None:
            hint = window.steps
            self._fixed_stages = self._by_node(window.steps)
        self.hinted = self._by_node(hint) if hint is not None else None
        self.runs: list[list[Run]] = [self._runs_of(k, max_runs) for k in range(self.count)]
        self.open = [any(not run.fixed for run in runs) for runs in self.runs]

    def backward_time(self, k: int) -> int:
        """Return the time of the backward of a node."""
        return self.stage[k] * self.width + self.count

    def readers(self, index: int) -> list[Run]:
        """Return the runs that read a storage; a backward is a run at a fixed time."""
        storage = self.problem.storages[index]
        readers = [run for u in storage.fwd_users for run in self.runs[u]]
        for u in storage.bwd_users:
            t = self.backward_time(u)
            readers.append(Run(t, None, t, t))
        return readers

    def can_change(self, index: int) -> bool:
        """Return whether an optional run makes or reads a storage."""
        storage = self.problem.storages[index]
        return self.open[storage.producer] or any(self.open[u] for u in storage.fwd_users)

    def _by_node(self, steps: Steps) -> dict[int, list[int]]:
        stages: dict[int, list[int]] = {}
        for stage, nodes in recomputed_by_stage(self.problem, steps).items():
            for node in sorted(set(nodes)):
                stages.setdefault(node, []).append(stage)
        return stages

    def _runs_of(self, k: int, max_runs: int) -> list[Run]:
        window = self._window
        first, last = 1, self._last_useful[k]
        before: list[int] = []
        behind: list[int] = []
        own = self._fixed_stages.get(k, [])
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
        runs = [Run(t, None, t, t) for t in (k, *(s * self.width + k for s in before))]
        hinted: list[int] = []
        if self.hinted is not None:
            hinted = [s for s in self.hinted.get(k, []) if first <= s <= last]
        previous: Run | None = None
        for i in range(min(max_runs - 1, last - first + 1)):
            present = self.cp.new_bool_var("")
            times = [s * self.width + k for s in range(first + i, last + 1)]
            start = self.cp.new_int_var_from_domain(self._domain(times), "")
            run = Run(start, present, times[0], times[-1])
            if previous is not None:
                # [Constraint] Optional runs are used in order.
                self.cp.add_implication(present, previous.present)
                self.cp.add(start > previous.start).only_enforce_if(present)
            if self.hinted is not None:
                self.cp.add_hint(present, i < len(hinted))
                if i < len(hinted):
                    self.cp.add_hint(start, hinted[i] * self.width + k)
            runs.append(run)
            previous = run
        runs += [Run(t, None, t, t) for t in (s * self.width + k for s in behind)]
        return runs

    def hinted_times(self, runs: list[Run]) -> dict[int, int]:
        """Return the hinted start of each run (by identity); absent runs are missing."""
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

    def hinted_time(self, run: Run) -> int | None:
        """Return the hinted start of one run, or None if the hint leaves it out."""
        if run.fixed:
            return int(run.start)
        return self.hinted_times(self.runs[run.earliest % self.width]).get(id(run))

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
