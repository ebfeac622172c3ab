"""The best schedule of a small chain, by exhaustive search.

It is not the dynamic program written slowly: it is Dijkstra's algorithm over memory states, and
knows only what the four operations do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op


@dataclass(frozen=True, slots=True, order=True)
class _State:
    """Everything that matters for what can be done next, and what it will cost."""

    backwards: int  # how many have run
    output_made: bool  # the loss has run, and the gradient of the output exists
    held: tuple[int, ...]  # boundary tensors alive outside of saved stages; 0 is the input
    fixed: tuple[int, ...]  # those of them that are checkpoints, and must be kept
    saved: tuple[tuple[int, int], ...]  # (stage, option), from its Fe to its B


def exhaustive_search(
    chain: Chain, budget_bytes: int, *, persistent: bool = True
) -> tuple[float, tuple[Op, ...]] | None:
    """Return the least makespan of any schedule within the budget, and one that attains it.

    `persistent` restricts the search to the class in which the recurrence is optimal: what is
    stored is kept until its own backward, so nothing that Fc or Fe has kept is forgotten before.
    Without it, any boundary tensor may be dropped at any time. Exponential: up to 5 stages.
    """
    start = _State(0, False, (0,), (), ())
    frontier: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    origin: dict[_State, tuple[_State, Op | None]] = {}
    distance = {start: 0.0}
    ticket = 0
    while frontier:
        time_ms, _, state = heapq.heappop(frontier)
        if time_ms > distance[state]:
            continue
        if state.backwards == len(chain):
            return time_ms, tuple(_path(origin, state))
        for op, step_ms, after in _moves(chain, budget_bytes, state, persistent):
            if time_ms + step_ms < distance.get(after, float("inf")):
                distance[after] = time_ms + step_ms
                origin[after] = (state, op)
                ticket += 1
                heapq.heappush(frontier, (time_ms + step_ms, ticket, after))
    return None


def _path(origin: dict[_State, tuple[_State, Op | None]], state: _State) -> list[Op]:
    ops: list[Op] = []
    while state in origin:
        state, op = origin[state]
        if op is not None:
            ops.append(op)
    return ops[::-1]


def _alive_bytes(chain: Chain, state: _State) -> int:
    boundary = sum(chain.stages[x - 1].output_bytes for x in state.held if x > 0)
    saved = sum(chain.stages[k].options[o].saved_bytes for k, o in state.saved)
    newest = len(chain) - state.backwards
    gradient = chain.stages[newest - 1].output_grad_bytes if state.output_made else 0
    return boundary + saved + gradient


def _moves(
    chain: Chain, budget: int, state: _State, persistent: bool
) -> Iterator[tuple[Op | None, float, _State]]:
    free = budget - _alive_bytes(chain, state)
    inside = {k + 1 for k, _ in state.saved}  # boundary tensors that live in a saved stage
    end = len(chain) - state.backwards  # stages below this one still wait for their backward
    last = len(chain) - 1
    if not persistent:
        for x in state.held:
            rest = tuple(y for y in state.held if y != x)
            yield None, 0.0, _State(state.backwards, state.output_made, rest, (), state.saved)
    for k in range(end):
        if k not in state.held and k not in inside:
            continue
        made = state.output_made or k == last
        stage = chain.stages[k]
        if k + 1 not in state.held and k + 1 not in inside:
            if stage.forward_peak_bytes <= free:
                held = tuple(sorted({*state.held, k + 1}))
                fixed = tuple(sorted({*state.fixed, k}))
                kept = _State(state.backwards, made, held, fixed, state.saved)
                yield ForwardCheckpoint(k), stage.forward_time_ms, kept
                if k in state.held and not (persistent and k in state.fixed):
                    rest = tuple(x for x in held if x != k)
                    dropped = _State(state.backwards, made, rest, state.fixed, state.saved)
                    yield ForwardNoGrad(k), stage.forward_time_ms, dropped
            for o, option in enumerate(stage.options):
                if option.saved_bytes + option.fwd_overhead_bytes <= free:
                    fixed = tuple(sorted({*state.fixed, k}))
                    saved = tuple(sorted({*state.saved, (k, o)}))
                    recorded = _State(state.backwards, made, state.held, fixed, saved)
                    yield ForwardEnableGrad(k, o), option.fwd_time_ms, recorded
    k = end - 1
    for o, option in enumerate(chain.stages[k].options):
        if (k, o) not in state.saved or (k not in state.held and k not in inside):
            continue
        if not state.output_made or option.bwd_overhead_bytes > free:
            continue
        held = tuple(x for x in state.held if x < k)
        fixed = tuple(x for x in state.fixed if x < k)
        saved = tuple(pair for pair in state.saved if pair != (k, o))
        after = _State(state.backwards + 1, state.output_made, held, fixed, saved)
        yield Backward(k, o), option.bwd_time_ms, after
