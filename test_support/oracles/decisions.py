"""Steps with decisions beside those of a twin that is trained plainly."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, measured_peak_bytes


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


def outcome(model: nn.Module, batch: Tensor, number: int) -> tuple[Tensor, Any]:
    seed(number)
    loss = model(batch)
    loss.backward()
    return loss.detach(), (random.getstate(), torch.get_rng_state().tolist())


def assert_steps_like(planned: nn.Module, twin: nn.Module, batches: Any, steps: int = 4) -> None:
    """Train both, with other decisions at every step, and compare what each step leaves."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (planned, twin)]
    for step in range(steps):
        ours, theirs = (outcome(m, batches(step), step) for m in (planned, twin))
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1], "the random numbers after a step"
        for (name, mine), other in zip(planned.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
        if any(p.grad is not None for p in twin.parameters()):
            assert_same_gradients(planned, twin)
        buffers = zip(planned.buffers(), twin.buffers(), strict=True)
        assert all(torch.equal(mine, other) for mine, other in buffers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))


def peak(model: nn.Module, batch: Tensor) -> int:
    """Return the peak of a step whose decisions are those of the sample's."""

    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            seed(7)
            return self.model(x)  # type: ignore[no-any-return]

    return measured_peak_bytes(Seeded(), (batch,), grads_exist=True)
