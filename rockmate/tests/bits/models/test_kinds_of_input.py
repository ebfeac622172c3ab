"""Other kinds of input, precisions and copies of the wrapper."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, assert_trains_like, eager_copy
from rockmate import RockmateError
from runs.planned import wrap
from zoo.nets import network


def test_the_last_smaller_batch_of_an_epoch_just_works() -> None:
    model, (ids, targets) = network("gpt")
    twin = eager_copy(model)
    wrapped = wrap(model, (ids, targets), 0.7)
    for rows in (4, 3, 4, 3):
        state = torch.get_rng_state()
        wrapped(ids[:rows], targets[:rows]).backward()
        torch.set_rng_state(state)
        twin(ids[:rows], targets[:rows]).backward()
        assert_same_gradients(model, twin)
    assert len(wrapped.plans) == 2


def test_the_plan_used_least_recently_is_dropped() -> None:
    model = nn.Linear(4, 4)
    wrapped = wrap(model, torch.randn(3, 4), "1MiB", max_plans=2)
    for rows in (5, 3, 6):
        wrapped(torch.randn(rows, 4)).sum().backward()
    assert [row.what for row in wrapped.plans] == ["float32[3, 4] on cpu", "float32[6, 4] on cpu"]
    assert "input 0 was float32[3, 4] on cpu and is float32[6, 4]" in str(wrapped.plans)
    wrapped(torch.randn(5, 4)).sum().backward()
    assert len(wrapped.plans) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt", "mixer"])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, sample = network(name)
    model.to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in sample)
    twin = eager_copy(model)
    assert_trains_like(wrap(model, inputs, 0.8), twin, inputs)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_autocast_around_the_call(name: str) -> None:
    model, sample = network(name)
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 1.0)
    state = torch.get_rng_state()
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = module(*sample)
            loss.backward()
    assert_same_gradients(model, twin)
    kinds = [planned.signature.autocast for planned in wrapped._rockmate.plans]
    assert kinds == [None, ("cpu", torch.bfloat16)]


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.tanh(self.first(x))
        with torch.no_grad():
            scale = y.float().abs().mean()
        return self.second(y.float() / scale)


def test_autocast_and_no_grad_regions_inside() -> None:
    torch.manual_seed(0)
    model, x = Inside(), torch.randn(32, 16)
    twin = eager_copy(model)
    assert_trains_like(wrap(model, x, "1MiB"), twin, x)


def test_channels_last_inputs() -> None:
    model, (pixels, labels) = network("resnet")
    model.to(memory_format=torch.channels_last)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    twin = eager_copy(model)
    assert_trains_like(wrap(model, (pixels, labels), 0.8), twin, (pixels, labels))


@pytest.mark.slow
def test_frozen_parameters_and_adapters() -> None:
    model, sample = network("gpt")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn.qkv" in name)
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 0.8)
    state = torch.get_rng_state()
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        module(*sample).backward()
    assert_same_gradients(model, twin)
    for module in (twin, wrapped):
        module.head.weight.requires_grad_(True)
        torch.set_rng_state(state)
        module(*sample).backward()
    assert_same_gradients(model, twin)
    assert "'wte.weight' was" in wrapped.plans[-1].why  # the two are tied


def test_a_deep_copy_is_independent() -> None:
    model, sample = network("resnet")
    wrapped = wrap(model, sample)
    other = copy.deepcopy(wrapped)
    twin = eager_copy(model)
    assert all(a is not b for a, b in zip(other.parameters(), wrapped.parameters(), strict=True))
    assert_trains_like(other, twin, sample)
    untouched = network("resnet")[0]
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_saved_and_loaded_it_plans_at_the_first_step() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, 1.0)
    loaded = pickle.loads(pickle.dumps(wrapped))
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    assert list(torch.load(file, weights_only=False).state_dict()) == list(model.state_dict())
    with pytest.raises(RockmateError, match="not been planned"):
        _ = loaded.plan
    loaded(*sample).backward()
    wrapped(*sample).backward()
    assert_same_gradients(loaded, model)
    assert loaded.budget_bytes == wrapped.budget_bytes


def test_loading_weights_and_changing_precision_of_the_data_in_place() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, 1.0)
    torch.manual_seed(5)
    other = type(model)()
    wrapped.load_state_dict(other.state_dict())
    wrapped(*sample).backward()
    other(*sample).backward()
    assert_same_gradients(model, other)


class Asking(nn.Module):
    """Asks whether its arguments are one object, as attention does of query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(16, 32)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if query is key:
            first, second = self.packed(query).chunk(2, -1)
        else:
            weights, biases = self.packed.weight.chunk(2), self.packed.bias.chunk(2)
            first = nn.functional.linear(query, weights[0], biases[0])
            second = nn.functional.linear(key, weights[1], biases[1])
        return first.tanh() * second


@pytest.mark.parametrize("together_first", [True, False])
def test_arguments_that_are_one_object_are_told_from_those_that_are_not(
    together_first: bool,
) -> None:
    torch.manual_seed(0)
    model = Asking()
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    calls = [(x, x), (x, y), (y, y)] if together_first else [(x, y), (x, x), (y, x)]
    wrapped = wrap(model, calls[0], "1MiB")
    for arguments in calls:
        wrapped(*arguments).square().sum().backward()
        twin(*arguments).square().sum().backward()
        assert_same_gradients(model, twin)
    assert len(wrapped.plans) in (2, 3)
    assert "the same object as input 0" in str(wrapped.plans)
