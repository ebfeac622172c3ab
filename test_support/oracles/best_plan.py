"""An exhaustive search over schedules of tiny problems: the oracle of every solver.

It knows only what a step needs and makes; it shares nothing with liveness, simulator or solvers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Step, Steps

# forwards and backwards done; storages held; rerun states held; last node run again since the last
# backward; runs per node (where they are limited); storages that are elsewhere
_State: TypeAlias = tuple[int, frozenset[int], frozenset[int], int, tuple[int, ...], frozenset[int]]


def exhaustive_search(
    problem: Problem,
    budget_bytes: int,
    *,
    ascending: bool = False,
    max_runs: int | None = None,
    moving: bool = False,
    in_forward: bool = False,
) -> tuple[float, Steps] | None:
    """Return the least overhead of any schedule within the budget, and its steps; None if none.

    Dijkstra over memory states: which storages and rerun states are held before which backward.
    With `ascending`, only schedules whose recomputations between two backwards run in the order of
    the nodes, each at most once, and each node at most `max_runs` times: the solvers' class. With
    `moving`, movable storages go elsewhere and come back in no time. With `in_forward`, nodes also
    run again before the forward has ended.
    """
    moves = _Moves(problem, budget_bytes, ascending=ascending, max_runs=max_runs, moving=moving)
    moves.in_forward = in_forward
    count = len(problem.nodes)
    nothing: frozenset[int] = frozenset()
    start: _State = (0, nothing, nothing, -1, (1,) * count if max_runs else (), nothing)
    best: dict[_State, float] = {start: 0.0}
    came: dict[_State, tuple[_State, Step | None]] = {}
    heap: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    ticket = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if best[state] < cost:
            continue
        if state[0] == count + len(problem.backward_order):
            steps: list[Step] = []
            while state in came:
                state, step = came[state]
                if step is not None:
                    steps.append(step)
            return cost, tuple(reversed(steps))
        for extra, new_state, step in moves.after(state):
            new_cost = cost + extra
            if new_cost < best.get(new_state, float("inf")):
                best[new_state] = new_cost
                came[new_state] = (state, step)
                ticket += 1
                heapq.heappush(heap, (new_cost, ticket, new_state))
    return None


class _Moves:
    """What may be done in a memory state: the time it takes, the state after it, the step."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        *,
        ascending: bool,
        max_runs: int | None,
        moving: bool,
    ) -> None:
        self.budget_bytes, self.ascending, self.max_runs = budget_bytes, ascending, max_runs
        self.in_forward = False
        self.nodes, self.storages = problem.nodes, problem.storages
        self.order = problem.backward_order
        nodes, storages = range(len(self.nodes)), tuple(enumerate(self.storages))
        self.made = [frozenset(i for i, s in storages if s.producer == k) for k in nodes]
        self.fwd = [frozenset(i for i, s in storages if k in s.fwd_users) for k in nodes]
        self.bwd = [frozenset(i for i, s in storages if k in s.bwd_users) for k in nodes]
        self.outputs = frozenset(i for i, s in storages if s.is_output)
        self.phantoms = frozenset(i for i, s in storages if s.is_phantom)
        self.movable = frozenset(i for i, s in storages if moving and s.is_movable)

    def after(self, state: _State) -> Iterator[tuple[float, _State, Step | None]]:
        """Yield every move from a state."""
        position, held, states, last, runs, away = state
        for index in held - self.outputs:  # dropping is for nothing
            yield 0.0, (position, held - {index}, states, last, runs, away), None
        for node in states:
            yield 0.0, (position, held, states - {node}, last, runs, away), None
        for index in held & self.movable - away:  # a copy out
            yield 0.0, (position, held, states, last, runs, away | {index}), None
        for index in away - held:
            if self._fits(state, held | {index}, states, 0):
                yield 0.0, (position, held | {index}, states, last, runs, away), None
        if position < len(self.nodes):  # the forward: its next node
            yield from self._first_runs(state)
            for k in range(position if self.in_forward else 0):
                yield from self._runs_again(state, k)
            return
        for k in range(len(self.nodes)):  # the backward: any node that may run again
            yield from self._runs_again(state, k)
        k = self.order[position - len(self.nodes)]
        if self._fits(state, held, states, self.nodes[k].bwd_peak_bytes) and self.bwd[k] <= held:
            yield 0.0, (position + 1, held, states, -1, runs, away), Step("B", k)

    def _first_runs(self, state: _State) -> Iterator[tuple[float, _State, Step | None]]:
        k, held, states, _, runs, away = state
        if not self.fwd[k] <= held:
            return
        for recorded, new in self._ways(k, held, else_recorded=True):
            node = self.nodes[k]
            peak = node.fwd_peak_bytes if recorded else node.fwd_peak_nograd_bytes
            for now in (states, states | {k}) if node.rerun_state_bytes else (states,):
                if self._fits(state, held, now, peak):
                    yield 0.0, (k + 1, new, now, -1, runs, away), Step("F", k)

    def _runs_again(self, state: _State, k: int) -> Iterator[tuple[float, _State, Step | None]]:
        position, held, states, last, runs, away = state
        node = self.nodes[k]
        if not self.fwd[k] <= held or (k not in states and node.rerun_state_bytes):
            return
        if (self.ascending and k <= last) or (self.max_runs and runs[k] >= self.max_runs):
            return
        if held & self.made[k] - self.outputs:
            return  # an old copy beside the new one is never of use: drop it first
        for recorded, new in self._ways(k, held, else_recorded=False):
            peak = node.fwd_peak_bytes if recorded else node.fwd_peak_nograd_bytes
            if self._fits(state, held, states, peak):
                more = tuple(r + (i == k) for i, r in enumerate(runs))
                yield node.fwd_time_ms, (position, new, states, k, more, away), Step("F", k)

    def _ways(
        self, k: int, held: frozenset[int], *, else_recorded: bool
    ) -> Iterator[tuple[bool, frozenset[int]]]:
        """Yield whether a run is recorded, and what is held after it."""
        made = self.made[k]
        if not made & self.phantoms:
            yield else_recorded, held | made
            return
        yield False, held | made - self.phantoms
        yield True, held | made

    def _fits(
        self, state: _State, held: frozenset[int], states: frozenset[int], peak_bytes: int
    ) -> bool:
        later = state[0] - len(self.nodes)
        gradients = self.nodes[self.order[later]].grads_before_bytes if later >= 0 else 0
        kept = sum(self.storages[i].size_bytes for i in held)
        kept += sum(self.nodes[k].rerun_state_bytes for k in states)
        return kept + gradients + peak_bytes <= self.budget_bytes
