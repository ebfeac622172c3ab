"""Edits through `.data`, numpy and the like between forward and backward: as plain, or by name.

PyTorch counts none of them. What backward reads directly is then what plain PyTorch's reads; what
it computes again would be another value than the forward's.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from rockmate import ChangedTensorError, InfeasibleBudgetError, Rockmate

ROWS, WIDTH = 64, 16


class Net(nn.Module):
    """A weight, a norm, a convolution and a buffer, of which the least budget reads some again."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((4 * WIDTH,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x.unsqueeze(1) * 2)).mean(1)
        for _ in range(6):
            x = self.norm(self.down(F.gelu(self.up(x) * self.scale)).tanh())
        return x.square().sum()


def _scaled(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


def _through_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] *= 0.5


def _one_element(tensor: Tensor) -> None:
    tensor.data.view(-1)[-1] += 1


def _other_memory(tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.5


EDITS = (_scaled, _through_numpy, _one_element, _other_memory)
NAMES = ("up.bias", "norm.weight", "down.bias", "scale", "x")


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def wrapped(model: nn.Module, room: float = 1.0, **options: Any) -> Rockmate:
    """Return the model within `room` times the least that it takes, which computes much again."""
    options = {"cost": "flops", "effort": "fast", **options}
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, batch(0).requires_grad_(), 1000, self_test=False, **options)
    budget = int(room * error.value.minimum_bytes)
    least = Rockmate(model, batch(0).requires_grad_(), budget, **options)
    assert least.plan.overhead > 0
    return least


def gradients(net: nn.Module, edit: Callable[[Tensor], None], name: str) -> list[Tensor]:
    x = batch(1).requires_grad_()
    net.zero_grad(set_to_none=True)
    loss = net(x)
    edit(x if name == "x" else {**dict(net.named_parameters()), "scale": net.scale}[name])
    loss.backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def assert_as_plain_or_named(
    net: nn.Module, planned: Rockmate, edit: Callable[[Tensor], None], name: str
) -> bool:
    """Assert that one step is plain PyTorch's or names what was edited; return which."""
    expected = gradients(net, edit, name)
    try:
        found = gradients(planned, edit, name)
    except ChangedTensorError as error:
        text = str(error)
    else:
        assert all(map(torch.equal, expected, found))
        return True
    assert name in text or name == "x"
    return False


@pytest.fixture(scope="module")
def least() -> Rockmate:
    return wrapped(Net(), room=1.5)  # some is computed again, and some is not


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_as_in_plain_pytorch_or_refused_by_name(
    least: Rockmate, edit: Callable[[Tensor], None]
) -> None:
    exact = {}
    for name in NAMES:
        net = Net()
        least.load_state_dict(net.state_dict())
        least.check()  # looks at the next step
        exact[name] = assert_as_plain_or_named(net, least, edit, name)
    assert {True, False} == set(exact.values())  # nothing refuses too much
    assert not exact["up.bias"]


def test_where_nothing_is_computed_again_an_edit_is_as_in_plain_pytorch() -> None:
    net = Net()
    planned = Rockmate(copy.deepcopy(net), batch(0).requires_grad_(), 1.0)
    for name in NAMES:
        planned.load_state_dict(net.state_dict())
        planned.check()
        assert assert_as_plain_or_named(copy.deepcopy(net), planned, _scaled, name)


def test_contents_are_compared_in_the_steps_that_a_user_asks_for() -> None:
    net = Net()
    planned = wrapped(net, check_every=5)
    for step in range(1, 13):
        plain = Net()
        plain.load_state_dict(net.state_dict())
        edit = _scaled if step in (5, 10) else Tensor.sum
        done = assert_as_plain_or_named(plain, planned, edit, "up.bias")
        assert done == (step not in (5, 10))


def _observed(memory: np.ndarray[Any, Any], seed: int) -> Tensor:
    """Return an input in the memory of an environment, which writes each observation there."""
    memory[...] = batch(seed).numpy()
    return torch.from_numpy(memory).requires_grad_()


@pytest.mark.parametrize("whole", [True, False])
def test_inputs_from_numpy_are_compared_in_every_step(least: Rockmate, whole: bool) -> None:
    memory = np.zeros((ROWS, WIDTH), dtype=np.float32)
    planned = least if whole else wrapped(Depth())
    for step in range(1, 8):
        loss = planned(_observed(memory, step))
        _observed(memory, step if step < 5 else step + 1)
        if step < 5:
            loss.backward()
            continue
        with pytest.raises(ChangedTensorError, match=r"through \.data(, | or )numpy"):
            loss.backward()


class Added(nn.Module):
    """Adds and multiplies by tensors that have no version: both are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        with torch.inference_mode():
            self.shift = torch.full((2 * ROWS * ROWS, 4 * WIDTH), 0.5)  # a large one
            self.scale = torch.full((ROWS, 4 * WIDTH), 1.1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.down(torch.tanh(self.up(x) + self.shift[:ROWS]).tanh() * self.scale).tanh()
        return x.square().sum()


def test_tensors_of_inference_mode_are_compared_in_every_step() -> None:
    net, twin = Added(), Added()  # plain PyTorch saves none for a backward: the twin's are usual
    twin.load_state_dict(net.state_dict())
    twin.shift, twin.scale = net.shift.clone(), net.scale.clone()
    planned = wrapped(net)
    for step in range(8):
        loss = planned(batch(step))
        if step < 5:
            loss.backward()
            twin(batch(step)).backward()
            for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                assert torch.equal(ours.grad, theirs.grad)
            continue
        with torch.inference_mode():
            net.shift[0] += 1
        with pytest.raises(ChangedTensorError):
            loss.backward()


SHIFT = torch.full((4 * WIDTH,), 1.1)  # a global


class Shifted(nn.Module):
    """Reads a buffer, a kept tensor and a global, which its recomputations read again."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.kept = torch.full((4 * WIDTH,), 0.9)
        self.register_buffer("scale", torch.full((4 * WIDTH,), 0.8))

    def part(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x) * SHIFT * self.kept) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.down(torch.tanh(self.part(x))).tanh()
        return x


class Deciding(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            if x.mean() < 100:
                x = part(x)
        return x.square().sum()


@pytest.mark.parametrize("decides", [True, False])
def test_small_tensors_are_compared_in_every_step(decides: bool) -> None:
    part = Shifted()
    model = Deciding(part) if decides else nn.Sequential(part)
    planned = wrapped(model)
    edited = (SHIFT, part.kept, part.scale)
    for step in range(6):  # contents of larger ones are compared in the first, second and fourth
        loss = planned(batch(step).requires_grad_()).sum()
        before = edited[step % 3].clone()
        _scaled(edited[step % 3])
        with pytest.raises(ChangedTensorError, match=r"in a way that PyTorch does not count"):
            loss.backward()
        edited[step % 3].copy_(before)
        planned(batch(step).requires_grad_()).sum().backward()


def test_edits_between_steps_are_what_training_does() -> None:
    net = Net()
    planned = wrapped(copy.deepcopy(net))
    for step in range(5):
        losses = []
        for model in (net, planned):
            model.zero_grad(set_to_none=True)
            loss = model(batch(step))
            loss.backward()
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.01).clamp_(-1, 1)
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for ours, theirs in zip(planned.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Depth(nn.Module):
    """Decides by random numbers, so that its blocks are planned one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 2:
                x = x + block(x).tanh()
        return x.square().sum()


@pytest.mark.parametrize("edit", [_scaled, lambda tensor: tensor.detach().mul_(0.5)])
def test_blocks_of_a_deciding_root_name_what_was_edited(edit: Callable[[Tensor], None]) -> None:
    model = Depth()
    planned = Rockmate(model, batch(0), 0.5, self_test=False)
    loss = planned(batch(1))
    for block in model.blocks:
        edit(block[0].bias)
    with pytest.raises(ChangedTensorError, match=r"0\.bias"):
        loss.backward()
