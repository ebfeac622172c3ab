"""What occupies memory in a program over retention intervals, and when.

Storages and phantoms are intervals that last until their readers. Workspaces and rerun states
belong to the runs. Bytes that do not depend on a choice go to the fixed background instead. See
solve.py for the overview.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from rockmate.solvers.intervals.memory import CumulativeMemory
from rockmate.solvers.intervals.runs import Run, TimeAxis


@dataclass(slots=True, eq=False)
class _Kept:
    """The interval of one storage made by one run."""

    run: Run
    end: Any
    present: Any  # None: always
    uses: list[int] = field(default_factory=list)  # hinted


class Demands:
    """Adds the memory demands of all runs and storages, family by family."""

    def __init__(self, line: TimeAxis, memory: CumulativeMemory) -> None:
        self._line = line
        self._memory = memory
        self._problem = line.problem
        self._cp = line.cp

    # --- storages ---------------------------------------------------------------------------------

    def add_storages(self) -> None:
        """Add intervals of the storages that can change, and fixed demands of the others."""
        problem = self._problem
        for k in range(self._line.count):
            phantoms = [i for i in problem.products[k] if problem.storages[i].is_phantom]
            if phantoms:
                self._add_phantom(k, sum(problem.sizes[i] for i in phantoms))
            for index in problem.products[k]:
                storage = problem.storages[index]
                if storage.is_phantom:
                    continue
                if storage.is_output:
                    # An output lives to the end. A run that makes it again counts it as workspace.
                    self._memory.add_fixed(k, self._line.horizon, storage.size_bytes)
                elif self._line.can_change(index):
                    self._add_storage(index)
                else:
                    self._add_closed_storage(index)

    def _add_closed_storage(self, index: int) -> None:
        storage = self._problem.storages[index]
        times = sorted(run.start for run in self._line.readers(index))
        starts = [run.start for run in self._line.runs[storage.producer]]
        for i, start in enumerate(starts):
            after = starts[i + 1] if i + 1 < len(starts) else self._line.horizon
            last = max((t for t in times if start < t <= after), default=start)
            # Bytes at the making step are counted here, its other workspace in `add_workspaces`.
            self._memory.add_fixed(start, last + 1, storage.size_bytes)

    def _add_storage(self, index: int) -> None:
        storage = self._problem.storages[index]
        kept = self._intervals(self._line.runs[storage.producer], storage.size_bytes)
        for reader in self._line.readers(index):
            self._add_reader(kept, reader)
        self._hint_ends(kept)

    def _add_phantom(self, k: int, size_bytes: int) -> None:
        """[Constraint] Exactly one run of the node makes its phantoms, which live until B(k)."""
        backward_time = self._line.backward_time(k)
        runs = [run for run in self._line.runs[k] if run.earliest < backward_time]
        if not self._line.open[k]:
            last = max(run.start for run in runs)
            for run in self._line.runs[k]:
                run.records = run.start == last
            self._memory.add_fixed(last, backward_time + 1, size_bytes)
            return
        if len(runs) == 1:
            runs[0].records = True
            self._memory.add_fixed(k, backward_time + 1, size_bytes)
        hinted = [k, *(s * self._line.width + k for s in (self._line.hinted or {}).get(k, []))]
        chosen = max(t for t in hinted if t < backward_time)
        kept: list[_Kept] = []
        for run in self._line.runs[k]:
            if run not in runs:
                run.records = False
            if run.records is not None:
                continue
            run.records = self._cp.new_bool_var("")
            if run.present is not None:
                self._cp.add_implication(run.records, run.present)
                self._cp.add(run.start < backward_time).only_enforce_if(run.records)
            size = self._cp.new_int_var(1, self._line.horizon, "")
            interval = self._cp.new_optional_interval_var(
                run.start, size, backward_time + 1, run.records, ""
            )
            self._memory.add(interval, size_bytes)
            kept.append(_Kept(run, backward_time + 1, run.records))
        if not kept:
            return
        self._cp.add_exactly_one([item.present for item in kept])
        for run, following in itertools.pairwise(runs):
            # [Constraint] It is the last run before the backward: a later one would replace them.
            literals = [run.records]
            if not following.fixed:
                literals.append(following.present)
            self._cp.add(following.start > backward_time).only_enforce_if(literals)
        if self._line.hinted is not None:
            times = self._line.hinted_times(self._line.runs[k])
            for item in kept:
                self._cp.add_hint(item.present, times.get(id(item.run)) == chosen)

    def _intervals(self, runs: list[Run], size_bytes: int) -> list[_Kept]:
        """Add one interval per run, from its start to a free end before the node's next run."""
        kept: list[_Kept] = []
        for run in runs:
            end = self._cp.new_int_var(run.earliest + 1, self._line.horizon, "")
            size = self._cp.new_int_var(1, self._line.horizon, "")
            if run.fixed:
                interval = self._cp.new_interval_var(run.start, size, end, "")
            else:
                interval = self._cp.new_optional_interval_var(run.start, size, end, run.present, "")
            self._memory.add(interval, size_bytes)
            # [Constraint] A run replaces the results of earlier runs.
            if run.fixed:
                for item in kept:
                    self._cp.add(item.end <= run.start)
            elif kept:
                self._cp.add(kept[-1].end <= run.start).only_enforce_if(run.present)
            kept.append(_Kept(run, end, run.present))
        return kept

    def _add_reader(self, kept: list[_Kept], reader: Run) -> None:
        """[Constraint] A reader at time t finds an interval that starts before t and ends after."""
        candidates = [item for item in kept if item.run.earliest < reader.latest]
        if reader.fixed:
            fixed = [item for item in candidates if item.run.fixed]
            latest = max(item.run.start for item in fixed)
            candidates = [
                item for item in candidates if not item.run.fixed or item.run.start == latest
            ]
            candidates = [item for item in candidates if item.run.latest >= latest]
        served = None
        if self._line.hinted is not None:
            served = self._hinted_server(kept, reader)
        if len(candidates) == 1:
            bound = self._cp.add(candidates[0].end > reader.start)
            if not reader.fixed:
                bound.only_enforce_if(reader.present)
            return
        literals = []
        for item in candidates:
            literal = self._cp.new_bool_var("")
            self._cp.add(item.end > reader.start).only_enforce_if(literal)
            if not item.run.fixed:
                self._cp.add_implication(literal, item.present)
            if item.run.latest >= reader.earliest:
                self._cp.add(item.run.start < reader.start).only_enforce_if(literal)
            literals.append(literal)
            if self._line.hinted is not None:
                self._cp.add_hint(literal, item is served)
        clause = self._cp.add_bool_or(literals)
        if not reader.fixed:
            clause.only_enforce_if(reader.present)

    # --- hints ------------------------------------------------------------------------------------

    def _hinted_server(self, kept: list[_Kept], reader: Run) -> _Kept | None:
        """Return the interval that serves a reader in the hint; note the use for its hinted end."""
        time_of = self._hinted_starts(kept)
        t = self._line.hinted_time(reader)
        if t is None:
            return None
        best = None
        for item in kept:
            start = time_of.get(id(item.run))
            if start is not None and start < t:
                best = item
        if best is not None:
            best.uses.append(t)
        return best

    def _hinted_starts(self, kept: list[_Kept]) -> dict[int, int]:
        return self._line.hinted_times([item.run for item in kept])

    def _hint_ends(self, kept: list[_Kept]) -> None:
        if self._line.hinted is None:
            return
        time_of = self._hinted_starts(kept)
        for item in kept:
            start = time_of.get(id(item.run))
            if start is not None:
                self._cp.add_hint(item.end, max([start, *item.uses]) + 1)

    # --- workspaces and state ---------------------------------------------------------------------

    def add_workspaces(self) -> None:
        """Add what each step needs beyond the storages that it reads and makes."""
        problem = self._problem
        for k in range(self._line.count):
            node = problem.nodes[k]
            mask = problem.product_masks[k]
            phantom = problem.bytes_of(problem.phantom_masks[k])
            for i, run in enumerate(self._line.runs[k]):
                made = problem.bytes_of(mask if i == 0 else mask & ~problem.output_mask) - phantom
                recording = problem.forward_peaks[k] - made - phantom
                plain = problem.forward_peaks_nograd[k] - made
                if not problem.phantom_masks[k]:
                    records = i == 0
                    self._add_moment(run, None, recording if records else plain)
                elif isinstance(run.records, bool):
                    self._add_moment(run, None, recording if run.records else plain)
                else:
                    self._add_moment(run, run.records, recording)
                    skips = self._cp.new_bool_var("")
                    # [Constraint] A run that is present either records or does not.
                    present = 1 if run.present is None else run.present
                    self._cp.add(run.records + skips == present)
                    self._add_moment(run, skips, plain)
            if node.rerun_state_bytes and len(self._line.runs[k]) > 1:
                self._add_rerun_state(k)

    def _add_moment(self, run: Run, present: Any, demand: int) -> None:
        """Add a demand during the single step of a run."""
        if not demand:
            return
        if run.fixed and present is None:
            self._memory.add_fixed(run.start, run.start + 1, demand)
            return
        if present is None:
            present = run.present
        interval = self._cp.new_optional_fixed_size_interval_var(run.start, 1, present, "")
        self._memory.add(interval, demand)

    def _add_rerun_state(self, k: int) -> None:
        """[Constraint] The rerun state lives from the first run to the last, if they differ."""
        runs = self._line.runs[k]
        size_bytes = self._problem.nodes[k].rerun_state_bytes
        fixed = [run for run in runs if run.fixed]
        optional = [run for run in runs if not run.fixed]
        if len(fixed) > 1:
            last = max(run.start for run in fixed)
            self._memory.add_fixed(k, last + 1, size_bytes)
            optional = [run for run in optional if run.latest > last]
            begin = last + 1
        else:
            begin = k
        if not optional:
            return
        end = self._cp.new_int_var(begin + 1, self._line.horizon, "")
        size = self._cp.new_int_var(1, self._line.horizon, "")
        interval = self._cp.new_optional_interval_var(begin, size, end, optional[0].present, "")
        self._memory.add(interval, size_bytes)
        for run in optional:
            self._cp.add(end > run.start).only_enforce_if(run.present)
