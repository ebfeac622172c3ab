"""An exhaustive search over schedules of tiny problems: the oracle of every solver.

It knows only what a step needs and makes; it shares nothing with liveness, simulator or solvers.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Step, Steps, backward, forward

# forwards and backwards done; storages held; rerun states held; last node run again since the last
# backward; runs per node (where they are limited)
_State: TypeAlias = tuple[int, frozenset[int], frozenset[int], int, tuple[int, ...]]


def exhaustive_search(
    problem: Problem, budget_bytes: int, *, ascending: bool = False, max_runs: int | None = None
) -> tuple[float, Steps] | None:
    """Return the least overhead of any schedule within the budget, and its steps; None if none.

    Dijkstra over memory states: which storages and rerun states are held before which backward.
    With `ascending`, only schedules whose recomputations between two backwards run in the order of
    the nodes, each at most once, and each node at most `max_runs` times: the solvers' class.
    """
    nodes, storages = problem.nodes, problem.storages
    count, order = len(nodes), problem.backward_order
    made = [frozenset(i for i, s in enumerate(storages) if s.producer == k) for k in range(count)]
    fwd = [frozenset(i for i, s in enumerate(storages) if k in s.fwd_users) for k in range(count)]
    bwd = [frozenset(i for i, s in enumerate(storages) if k in s.bwd_users) for k in range(count)]
    outputs = frozenset(i for i, s in enumerate(storages) if s.is_output)
    phantoms = frozenset(i for i, s in enumerate(storages) if s.is_phantom)

    def held_bytes(held: frozenset[int], states: frozenset[int]) -> int:
        return sum(storages[i].size_bytes for i in held) + sum(
            nodes[k].rerun_state_bytes for k in states
        )

    start: _State = (0, frozenset(), frozenset(), -1, (1,) * count if max_runs else ())
    best: dict[_State, float] = {start: 0.0}
    came: dict[_State, tuple[_State, Step | None]] = {}
    heap: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    ticket = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if best[state] < cost:
            continue
        position, held, states, last, runs = state
        if position == count + len(order):
            steps: list[Step] = []
            while state in came:
                state, step = came[state]
                if step is not None:
                    steps.append(step)
            return cost, tuple(reversed(steps))
        following: list[tuple[float, _State, Step | None]] = []
        in_forward = position < count
        grads = 0 if in_forward else nodes[order[position - count]].grads_before_bytes
        # drop one thing, for nothing
        for index in held - (outputs if not in_forward else frozenset()):
            if index in outputs:
                continue
            following.append((cost, (position, held - {index}, states, last, runs), None))
        for node in states:
            following.append((cost, (position, held, states - {node}, last, runs), None))
        # run a forward: in the forward phase the next one, later any whose state was kept
        for k in [position] if in_forward else range(count):
            if not fwd[k] <= held:
                continue
            if not in_forward:
                if k not in states and nodes[k].rerun_state_bytes:
                    continue
                if ascending and k <= last:
                    continue
                if max_runs and runs[k] >= max_runs:
                    continue
            if not in_forward and any(i in held and i not in outputs for i in made[k]):
                continue  # an old copy beside the new one is never of use: drop it first
            for with_graph in (False, True):
                own_phantoms = made[k] & phantoms
                if with_graph and not own_phantoms:
                    continue
                recorded = with_graph if own_phantoms else in_forward
                peak = nodes[k].fwd_peak_bytes if recorded else nodes[k].fwd_peak_nograd_bytes
                new = held | (made[k] if with_graph else made[k] - phantoms)
                for keep_state in (False, True) if in_forward else (False,):
                    if keep_state and not nodes[k].rerun_state_bytes:
                        continue
                    now = states | {k} if keep_state else states
                    if held_bytes(held, now) + grads + peak > budget_bytes:
                        continue
                    extra = 0.0 if in_forward else nodes[k].fwd_time_ms
                    after: _State
                    if in_forward:
                        after = (position + 1, new, now, -1, runs)
                    else:
                        more = tuple(r + (i == k) for i, r in enumerate(runs))
                        after = (position, new, now, k, more)
                    following.append((cost + extra, after, forward(k)))
        # run the next backward
        if not in_forward:
            k = order[position - count]
            fits = held_bytes(held, states) + grads + nodes[k].bwd_peak_bytes <= budget_bytes
            if fits and bwd[k] <= held:
                following.append((cost, (position + 1, held, states, -1, runs), backward(k)))
        for new_cost, new_state, step in following:
            if new_cost < best.get(new_state, float("inf")):
                best[new_state] = new_cost
                came[new_state] = (state, step)
                ticket += 1
                heapq.heappush(heap, (new_cost, ticket, new_state))
    return None
