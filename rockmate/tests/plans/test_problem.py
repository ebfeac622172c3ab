"""The frozen problem: validation, derived tables, JSON, fingerprint."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from rockmate.problems.problem import Node, Problem, Storage
from zoo.problems import gpt_problem, random_problem, small_problems


@given(small_problems())
def test_json_gives_an_equal_problem_back(problem: Problem) -> None:
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.fingerprint == problem.fingerprint


def test_derived_tables_are_inverse_to_the_storages() -> None:
    problem = random_problem(3, 6)
    for index, storage in enumerate(problem.storages):
        assert index in problem.products[storage.producer]
        for user in storage.fwd_users:
            assert problem.fwd_input_masks[user] >> index & 1
        for user in storage.bwd_users:
            assert index in problem.bwd_inputs[user]
    assert problem.backward_order == tuple(
        k for k in range(5, -1, -1) if problem.nodes[k].has_backward
    )


def test_fingerprint_ignores_times_and_sees_sizes() -> None:
    problem = gpt_problem(1)
    slower = dataclasses.replace(
        problem,
        nodes=tuple(dataclasses.replace(n, fwd_time_ms=n.fwd_time_ms * 2) for n in problem.nodes),
    )
    assert slower.fingerprint == problem.fingerprint
    first = dataclasses.replace(problem.storages[0], size_bytes=problem.storages[0].size_bytes + 1)
    larger = dataclasses.replace(problem, storages=(first, *problem.storages[1:]))
    assert larger.fingerprint != problem.fingerprint


NODE = Node("a", 1.0, 1.0)


@pytest.mark.parametrize(
    ("nodes", "storages", "message"),
    [
        ((dataclasses.replace(NODE, fwd_time_ms=-1.0),), (), "fwd_time_ms is -1"),
        ((dataclasses.replace(NODE, bwd_time_ms=float("nan")),), (), "bwd_time_ms is nan"),
        ((dataclasses.replace(NODE, bwd_peak_bytes=-4),), (), "bwd_peak_bytes is -4"),
        ((NODE,), (Storage("s", 1, 1),), "no node 1"),
        ((NODE,), (Storage("s", -1, 0),), "size -1"),
        ((NODE,), (Storage("s", 1, 0, fwd_users=(0,)),), "read before it is made"),
        ((NODE,), (Storage("s", 1, 0, bwd_users=(1,)),), "a backward that does not exist"),
        ((NODE,), (Storage("p", 1, 0, is_phantom=True),), "its producer as only user"),
    ],
)
def test_inconsistent_problems_are_refused(nodes, storages, message) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(nodes, storages)
