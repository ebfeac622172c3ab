"""The memory of a program over retention intervals: one cumulative resource, the budget.

It collects the demands of the program's intervals and the fixed ones. Both are counted in units of
bytes that keep the solver's integers small. See solve.py for the overview.
"""

from __future__ import annotations

import bisect
import math
from typing import Any

from rockmate.problems.problem import Problem
from rockmate.solvers.intervals.runs import TimeAxis

_UNITS = 1 << 20  # largest number of units in the budget


class CumulativeMemory:
    """All demands over time, and the capacity that bounds them."""

    def __init__(self, line: TimeAxis, budget_bytes: int) -> None:
        self._line = line
        self.unit_bytes = _unit_bytes(line.problem, budget_bytes)
        self._capacity = budget_bytes // self.unit_bytes
        self._demands: list[tuple[Any, int]] = []  # intervals and their units
        self._fixed: list[tuple[int, int, int]] = []  # from, to (exclusive), bytes
        self._highest_fixed = 0  # units

    @property
    def hopeless(self) -> bool:
        """Whether the fixed demands alone exceed the budget."""
        return self._highest_fixed > self._capacity

    def add(self, interval: Any, size_bytes: int) -> None:
        """Count bytes during an interval of the program."""
        self._demands.append((interval, self._units(size_bytes)))

    def add_fixed(self, begin: int, end: int, size_bytes: int) -> None:
        """Count bytes from `begin` to `end` (exclusive)."""
        self._fixed.append((begin, end, size_bytes))

    def close(self) -> None:
        """Turn the fixed demands into intervals; nothing can be added afterwards."""
        line, nodes = self._line, self._line.problem.nodes
        for node, stage in line.stage.items():
            begin = stage * line.width
            self.add_fixed(begin, begin + line.width, nodes[node].grads_before_bytes)
            moment = line.backward_time(node)
            self.add_fixed(moment, moment + 1, nodes[node].bwd_peak_bytes)
        change: dict[int, int] = {}
        for begin, end, size in self._fixed:
            change[begin] = change.get(begin, 0) + size
            change[end] = change.get(end, 0) - size
        moments, events = self._moments()
        level = 0
        position = 0
        borders = sorted(change)
        # Merge moments of equal demand. Nothing runs between two moments.
        merged: list[list[int]] = []
        for moment in moments:
            while position < len(borders) and borders[position] <= moment:
                level += change[borders[position]]
                position += 1
            demand = self._units(level)
            self._highest_fixed = max(self._highest_fixed, demand)
            if merged and merged[-1][2] == demand:
                merged[-1][1] = moment + 1
            elif merged and _is_quiet(events, merged[-1][0], moment):
                merged[-1][1] = moment + 1
                merged[-1][2] = max(merged[-1][2], demand)
            else:
                merged.append([moment, moment + 1, demand])
        for begin, end, demand in merged:
            if demand:
                interval = line.cp.new_fixed_size_interval_var(begin, end - begin, "")
                self._demands.append((interval, demand))

    def _moments(self) -> tuple[list[int], list[int]]:
        """Return times at which a step may run, and times at which an interval may start or end."""
        line, problem = self._line, self._line.problem
        times = {line.backward_time(k) for k in line.stage}
        events: set[int] = set()
        for k, runs in enumerate(line.runs):
            for run in runs:
                if run.fixed:
                    times.add(run.start)
                else:
                    first, last = run.earliest // line.width, run.latest // line.width
                    options = {s * line.width + k for s in range(first, last + 1)}
                    times |= options
                    events |= options
        for index, storage in enumerate(problem.storages):
            if storage.is_output or storage.is_phantom:
                continue
            if line.can_change(index):
                events |= {run.start for run in line.runs[storage.producer] if run.fixed}
                events |= {run.start for run in line.readers(index) if run.fixed}
        for k in range(line.count):
            if line.open[k] and problem.phantom_masks[k]:
                events.add(line.backward_time(k))
                events |= {run.start for run in line.runs[k] if run.fixed}
        return sorted(times), sorted(events)

    def add_capacity(self, *, minimise_peak: bool) -> Any:
        """[Constraint] At every time, demands fit into the budget; return that capacity."""
        cp = self._line.cp
        peak: Any = self._capacity
        if minimise_peak:
            low = min(self._highest_fixed, self._capacity)
            peak = cp.new_int_var(low, self._capacity, "peak")
        demands = [(interval, units) for interval, units in self._demands if units]
        if demands:
            cp.add_cumulative(*zip(*demands, strict=True), peak)
        return peak

    def _units(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes)


def _is_quiet(events: list[int], begin: int, end: int) -> bool:
    """Return whether no interval can start or end in a span, both ends included."""
    return bisect.bisect_left(events, begin) == bisect.bisect_right(events, end)


def _unit_bytes(problem: Problem, budget_bytes: int) -> int:
    """Return the unit in which memory is counted; it is exact if the numbers stay small."""
    exact = math.gcd(
        *problem.sizes,
        *problem.forward_peaks,
        *problem.forward_peaks_nograd,
        *(node.bwd_peak_bytes for node in problem.nodes),
        *(node.grads_before_bytes for node in problem.nodes),
        *(node.rerun_state_bytes for node in problem.nodes),
    )
    return max(1, exact, budget_bytes // _UNITS)
