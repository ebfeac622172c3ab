"""K reproduces autograd's gradients in any order that it allows, and accounts for its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rkgb
from rkgb.testing import EXAMPLES, example
from rkgb.testing_walk import assert_k_gives_gradients


def built(name: str) -> tuple[nn.Module, object, rkgb.RkgbResult]:
    model, sample = example(name)
    return model, sample, rkgb.make_all_graphs(model, sample, cost="flops")


@pytest.mark.parametrize("name", EXAMPLES)
def test_walking_k_gives_autograds_gradients(name: str) -> None:
    model, sample, result = built(name)
    assert_k_gives_gradients(result.K_graph, result.inspection, model, sample)


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_order_of_k_gives_autograds_gradients(name: str) -> None:
    model, sample, result = built(name)

    @settings(max_examples=5, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        assert_k_gives_gradients(result.K_graph, result.inspection, model, sample, seed=seed)

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
            assert_k_gives_gradients(broken, result.inspection, model, sample)


def test_the_walk_notices_a_missing_contribution() -> None:
    model, sample, result = built("residual")
    kg = result.K_graph
    order = [node.name for node in kg.compute]
    place, data = next((i, d) for i, d in enumerate(kg.data) if len(d.producers) > 1)
    assert data.kind == "grad"
    early = replace(data, producers=data.producers[-1:])
    assert order.index(early.producers[0]) < order.index(data.producers[0])
    broken = replace(kg, data=(*kg.data[:place], early, *kg.data[place + 1 :]))
    failures = 0
    for seed in range(12):
        try:
            assert_k_gives_gradients(broken, result.inspection, model, sample, seed=seed)
        except (AssertionError, KeyError):
            failures += 1
    assert failures > 0


def test_bytes_of_a_node() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5)).train()
    x = torch.randn(3, 4, requires_grad=True)
    kg = rkgb.make_all_graphs(model, x, cost="flops").K_graph
    forward = {node.op: node for node in kg.compute if node.kind == "fwd"}
    value = 3 * 8 * 4
    assert {op: node.output_bytes for op, node in forward.items()} == {
        "linear": value,
        "tanh": value,
        "dropout": value,
    }
    assert forward["linear"].saved_bytes == 0  # its input is the model's, and resident
    assert forward["tanh"].saved_bytes == value  # its own result
    phantoms = {data.producers[0]: data.size_bytes for data in kg.data if data.kind == "phantom"}
    assert list(phantoms) == [forward["dropout"].name]
    assert forward["dropout"].saved_bytes == phantoms[forward["dropout"].name]


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
