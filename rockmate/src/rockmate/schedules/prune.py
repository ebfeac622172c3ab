"""Drop recomputations from a plan one by one, updating the peak of every step.

Dropping the recomputation of a node at step t changes only a few live ranges. Its results now live
on from the node's run before, and its inputs may die earlier. So a drop costs microseconds, whereas
a simulation costs milliseconds, and plans of thousands of steps can be pruned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from rockmate.problems.problem import Problem
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step, Steps


class EditablePlan:
    """The steps of a valid plan, some of which may be dropped; step indices do not change."""

    def __init__(self, problem: Problem, steps: Steps) -> None:
        self.problem = problem
        self._steps: list[Step | None] = list(steps)
        self.peaks = np.array(simulate(problem, steps).peak_during, dtype=np.int64)
        self._runs: list[list[int]] = [[] for _ in problem.nodes]
        self._uses: list[list[int]] = [[] for _ in problem.storages]
        self._backward_at = [-1] * len(problem.nodes)
        for t, (kind, node) in enumerate(steps):
            if kind == "F":
                self._runs[node].append(t)
            else:
                self._backward_at[node] = t
            for index in problem.reads(kind, node):
                self._uses[index].append(t)

    @property
    def steps(self) -> Steps:
        """The remaining steps."""
        return tuple(step for step in self._steps if step is not None)

    def recomputations(self) -> list[int]:
        """Indices of the remaining recomputations."""
        return sorted(t for runs in self._runs for t in runs[1:])

    def node_at(self, t: int) -> int:
        """Node of the step at an index."""
        step = self._steps[t]
        assert step is not None
        return step.node

    def drop(self, t: int, budget_bytes: int) -> bool:
        """Drop the recomputation at index t if the budget allows it; return whether it did."""
        step = self._steps[t]
        assert step is not None
        assert step.kind == "F"
        assert t > self._runs[step.node][0]
        changes = self._changes_without(t, step.node)
        for begin, end, size in changes:
            self.peaks[begin : end + 1] += size
        kept = self.peaks[t]
        self.peaks[t] = 0
        for begin, end, size in changes:
            if size > 0 and self.peaks[begin : end + 1].max() > budget_bytes:
                self.peaks[t] = kept
                for undo_begin, undo_end, undo_size in changes:
                    self.peaks[undo_begin : undo_end + 1] -= undo_size
                return False
        runs = self._runs[step.node]
        runs.pop(bisect_left(runs, t))
        for index in self.problem.fwd_inputs[step.node]:
            uses = self._uses[index]
            uses.pop(bisect_left(uses, t))
        self._steps[t] = None
        return True

    def _changes_without(self, t: int, k: int) -> list[tuple[int, int, int]]:
        """Return the changes of peaks without the run of k at t: from, to (inclusive), bytes."""
        problem = self.problem
        changes: list[tuple[int, int, int]] = []
        runs = self._runs[k]
        position = bisect_left(runs, t)
        before = runs[position - 1]
        behind = runs[position + 1] if position + 1 < len(runs) else len(self._steps)
        for index in problem.products[k]:
            storage = problem.storages[index]
            if storage.is_output:
                continue
            uses = self._uses[index]
            # A read at the step `behind` itself would be one of this run's copy. There is none,
            # because a forward does not read its own results.
            high = bisect_left(uses, behind)
            if high == 0 or uses[high - 1] <= t:
                continue  # nobody reads this copy
            low = bisect_left(uses, t)
            last = max(before, uses[low - 1]) if low else before
            changes.append((last + 1, t, storage.size_bytes))
        phantom = problem.phantom_masks[k]
        if phantom and t < self._backward_at[k] < behind:
            more = problem.forward_peaks[k] - problem.forward_peaks_nograd[k]
            changes.append((before, before, more))
        for index in problem.fwd_inputs[k]:
            storage = problem.storages[index]
            if storage.is_output:
                continue
            made = self._runs[storage.producer]
            place = bisect_right(made, t)
            start = made[place - 1]
            end = made[place] if place < len(made) else len(self._steps)
            uses = self._uses[index]
            low = bisect_left(uses, t)
            if low + 1 < len(uses) and uses[low + 1] < end:
                continue  # read again later
            last = max(start, uses[low - 1]) if low else start
            changes.append((last + 1, t, -storage.size_bytes))
        state = problem.nodes[k].rerun_state_bytes
        if state and position + 1 == len(runs):
            low_t = before if before == runs[0] else before + 1
            changes.append((low_t, t, -state))
        return changes


def prune(problem: Problem, steps: Sequence[Step], budget_bytes: int) -> Steps:
    """Return the steps without the recomputations that the budget does not need.

    The most expensive ones are dropped first, until none can be dropped. The peak is exact after
    every drop. If the steps exceed the budget, only drops that lower the peak are made.
    """
    plan = EditablePlan(problem, tuple(steps))
    times = [node.fwd_time_ms for node in problem.nodes]
    limit = max(budget_bytes, int(plan.peaks.max(initial=0)))
    changed = True
    while changed:
        changed = False
        # Among equals the latest first: its copy lives for the shortest time.
        order = sorted(plan.recomputations(), key=lambda t: (-times[plan.node_at(t)], -t))
        for t in order:
            changed |= plan.drop(t, limit)
    return plan.steps
