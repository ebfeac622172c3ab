"""K reproduces autograd's gradients in any order that it allows, and accounts for its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rkgb
from oracles.k_walk import assert_k_gives_gradients
from zoo.examples import EXAMPLES, example


def built(name: str) -> tuple[nn.Module, object, rkgb.RkgbResult]:
    model, sample = example(name)
    return model, sample, rkgb.make_all_graphs(model, sample, cost="flops")


@pytest.mark.parametrize("name", EXAMPLES)
def test_walking_k_gives_autograds_gradients(name: str) -> None:
    model, sample, result = built(name)
    assert_k_gives_gradients(result.K_graph, result.S_graph, model, sample)


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_order_of_k_gives_autograds_gradients(name: str) -> None:
    model, sample, result = built(name)

    @settings(max_examples=5)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        assert_k_gives_gradients(result.K_graph, result.S_graph, model, sample, seed=seed)

    check()


def test_the_walk_notices_a_missing_reader() -> None:
    """The oracle above can fail: take a backward out of the readers of a value."""
    model, sample, result = built("residual")
    kg = result.K_graph
    for place, data in enumerate(kg.data):
        backwards = [name for name in data.users if name.startswith("bwd")]
        if data.kind != "data" or not backwards:
            continue
        users = tuple(name for name in data.users if name not in backwards)
        broken = replace(
            kg, data=(*kg.data[:place], replace(data, users=users), *kg.data[place + 1 :])
        )
        with pytest.raises(KeyError):
            assert_k_gives_gradients(broken, result.S_graph, model, sample)


def test_the_walk_notices_a_missing_reader_of_a_gradient() -> None:
    model, sample, result = built("overlapping")
    kg = result.K_graph
    shared = [(i, d) for i, d in enumerate(kg.data) if d.kind == "grad" and len(d.users) > 1]
    assert shared
    for place, data in shared:
        users = tuple(name for name in data.users if name != data.users[-1])
        broken = replace(
            kg, data=(*kg.data[:place], replace(data, users=users), *kg.data[place + 1 :])
        )
        with pytest.raises(KeyError):
            assert_k_gives_gradients(broken, result.S_graph, model, sample)


@pytest.mark.parametrize("name", ["residual", "overlapping"])
def test_the_walk_notices_a_missing_maker_of_a_gradient(name: str) -> None:
    """Without it, some order reads the gradient before it is there."""
    model, sample, result = built(name)
    kg = result.K_graph
    failures = 0
    for place, data in enumerate(kg.data):
        if data.kind != "grad" or not data.producers:
            continue
        broken = replace(
            kg, data=(*kg.data[:place], replace(data, producers=()), *kg.data[place + 1 :])
        )
        for seed in range(12):
            try:
                assert_k_gives_gradients(broken, result.S_graph, model, sample, seed=seed)
            except KeyError:
                failures += 1
                break
    assert failures > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients_are_made_before_they_are_read(name: str) -> None:
    kg = built(name)[2].K_graph
    order = {node.name: place for place, node in enumerate(kg.compute)}
    for data in kg.data:
        assert not set(data.producers) & set(data.users) or len(data.producers) > 1
        if data.kind == "grad" and data.producers:
            assert order[data.producers[0]] < min(order[name] for name in data.users)
    for node in kg.compute:
        assert all(order[other] < order[node.name] for other in node.after)


def test_bytes_of_a_node() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    x = torch.randn(3, 4, requires_grad=True)
    kg = rkgb.make_all_graphs(model, x, cost="flops").K_graph
    forward = {node.op: node for node in kg.compute if node.kind == "fwd"}
    value = 3 * 8 * 4
    assert {op: node.output_bytes for op, node in forward.items()} == {
        "addmm": value,
        "tanh": value,
        "native_batch_norm": value,
        "bernoulli_": value,  # the mask of the dropout
        "mul": value,
    }
    assert forward["addmm"].saved_bytes == 0  # its input is the model's, and resident
    assert forward["tanh"].saved_bytes == value  # its own result
    statistics = 2 * 8 * 4  # mean and deviation, which only the backward reads
    assert forward["native_batch_norm"].saved_bytes == value + statistics
    assert forward["mul"].saved_bytes == value
    phantoms = {data.producers[0]: data.size_bytes for data in kg.data if data.kind == "phantom"}
    assert phantoms == {forward["native_batch_norm"].name: statistics}


@pytest.mark.parametrize("name", EXAMPLES)
def test_saved_bytes_are_what_the_backward_reads(name: str) -> None:
    _, _, result = built(name)
    kg = result.K_graph
    for node in kg.compute:
        if node.kind == "fwd":
            backward = f"bwd_{node.node}"
            read = [d for d in kg.data if d.kind != "grad" and backward in d.users]
            if any(other.name == backward for other in kg.compute):
                assert node.saved_bytes == sum(data.size_bytes for data in read)
