"""Chains as algorithmic differentiation knows them, against `checkpoint_schedules`.

A chain of equal steps. A step is reversed with its tape, which running it makes; there is room for
one tape, and for a number of states to start from again, the initial one included. Revolve is
optimal for this, so the plan must run exactly as many steps. In the problem a tape takes more bytes
than all other states together, and a step that runs has its first state and its last one beside
those that are kept.
"""

from __future__ import annotations

from rockmate.planning import Node, Problem, Storage

STATE_BYTES = 1000
CHAINS = ((10, 3), (20, 4), (50, 5), (100, 6), (100, 12), (200, 8))  # steps, slots


def revolve_problem(steps: int, slots: int) -> tuple[Problem, int]:
    """Return the chain as a problem, and the budget of these slots."""
    tape = (slots + 2) * STATE_BYTES
    nodes = tuple(Node(f"step {k}", fwd_time_ms=1.0) for k in range(steps))
    storages: list[Storage] = []
    for k in range(steps):
        reader = (k + 1,) if k + 1 < steps else ()
        storages.append(Storage(f"state {k + 1}", STATE_BYTES, k, fwd_users=reader))
        storages.append(Storage(f"tape {k}", tape, k, bwd_users=(k,), is_phantom=True))
    # The initial state takes a slot there, and is never counted here.
    return Problem(nodes, tuple(storages)), (slots - 1 + 2) * STATE_BYTES + tape


def steps_of_revolve(steps: int, slots: int) -> tuple[int, str] | None:
    """Return how many forward steps Revolve runs, and its version; None if it is not installed."""
    try:
        from importlib.metadata import version

        from checkpoint_schedules import EndReverse, Forward, Revolve
    except ImportError:
        return None
    count = 0
    for action in Revolve(steps, slots):
        if isinstance(action, Forward):
            count += action.n1 - action.n0
        if isinstance(action, EndReverse):
            break
    return count, version("checkpoint_schedules")
