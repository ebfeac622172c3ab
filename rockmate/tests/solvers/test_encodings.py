"""One network written as several problems: nodes apart, in other orders. The plans are the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rockmate.planners import plan
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.simulate import simulate
from rockmate.solvers.bound import lower_bound


def u_shaped(seed: int, depth: int = 9) -> Problem:
    """Return a chain that narrows and widens, with an edge from each level to the one opposite."""
    draw = random.Random(seed)
    count = 2 * depth
    sizes = [(1000 << abs(2 * k + 1 - count) // 6) + draw.randrange(50) for k in range(count)]
    reads = [[k - 1] * (k > 0) for k in range(count)]
    for k in range(depth + 1, count):
        reads[k].append(count - 1 - k)
    nodes = tuple(
        Node(
            f"op {k}",
            fwd_time_ms=draw.uniform(1, 9),
            bwd_time_ms=10.0,
            bwd_peak_bytes=sizes[k],
            grads_before_bytes=sum(sizes[count - 1 - k : depth : 3]) if k > depth else sizes[k],
        )
        for k in range(count)
    )
    users = [[k for k in range(count) if made in reads[k]] for made in range(count)]
    storages = tuple(
        Storage(f"of op {k}", sizes[k], k, tuple(users[k]), tuple(sorted({k, *users[k]})))
        for k in range(count)
    )
    return Problem(nodes, storages)


def apart(problem: Problem) -> Problem:
    """Return the problem with a node for each forward and, behind it, one for its backward."""
    nodes: list[Node] = []
    for node in problem.nodes:
        nothing = {"bwd_time_ms": 0.0, "bwd_peak_bytes": 0, "grads_before_bytes": 0}
        nodes.append(replace(node, has_backward=False, **nothing))
        nodes.append(replace(node, name=f"{node.name}'", fwd_time_ms=0.0))
    storages = tuple(
        replace(
            storage,
            producer=2 * storage.producer,
            fwd_users=tuple(2 * user for user in storage.fwd_users),
            bwd_users=tuple(2 * user + 1 for user in storage.bwd_users),
        )
        for storage in problem.storages
    )
    return Problem(tuple(nodes), storages)


def in_another_order(problem: Problem, seed: int) -> Problem:
    """Return the same step: what runs forward, and what runs backward, stays in its order."""
    draw = random.Random(seed)
    order = list(range(len(problem.nodes)))
    links = {(s.producer, user) for s in problem.storages for user in s.fwd_users + s.bwd_users}
    for _ in range(100 * len(order)):
        place = draw.randrange(len(order) - 1)
        first, second = order[place : place + 2]
        both_back = problem.nodes[first].has_backward and problem.nodes[second].has_backward
        both_make = problem.products[first] and problem.products[second]
        if (first, second) not in links and not both_back and not both_make:
            order[place : place + 2] = second, first
    at = {node: place for place, node in enumerate(order)}
    storages = tuple(
        replace(
            storage,
            producer=at[storage.producer],
            fwd_users=tuple(sorted(at[user] for user in storage.fwd_users)),
            bwd_users=tuple(sorted(at[user] for user in storage.bwd_users)),
        )
        for storage in problem.storages
    )
    return Problem(tuple(problem.nodes[node] for node in order), storages)


@pytest.mark.parametrize(
    ("seed", "share"),
    [(0, 0.7), *(pytest.param(1, s, marks=pytest.mark.nightly) for s in (0.8, 0.6))],
)
def test_every_encoding_of_a_network_gets_as_good_a_plan(seed: int, share: float) -> None:
    problem = u_shaped(seed)
    budget = int(share * simulate(problem, no_recomputation(problem)).peak_bytes)
    encodings = [problem, apart(problem)]
    encodings += [in_another_order(apart(problem), order) for order in (1, 2)]
    assert len({one.fingerprint for one in encodings}) == len(encodings)
    found = [plan(one, budget, effort="balanced") for one in encodings]
    assert found[0].overhead > 0
    for other in found[1:]:
        assert other.overhead == pytest.approx(found[0].overhead, abs=5e-4)


def test_the_bound_does_not_depend_on_the_encoding() -> None:
    problem = u_shaped(0)
    budget = int(0.7 * simulate(problem, no_recomputation(problem)).peak_bytes)
    bound = lower_bound(problem, budget)
    assert bound > 0
    assert lower_bound(in_another_order(apart(problem), 1), budget) == pytest.approx(bound)
