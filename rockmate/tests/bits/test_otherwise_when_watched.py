"""Functions that torch computes otherwise while a mode, as a recording is one, sees operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from oracles.training import eager_copy
from rkgb.recording import watch
from rockmate import Rockmate, SelfTestError

End = Callable[["Ending", Tensor, Tensor], Tensor]


def smoothed(end: Ending, scores: Tensor, targets: Tensor) -> Tensor:
    """Sums the weights of classes, without those of ignored targets."""
    return F.cross_entropy(scores, targets, end.weight, ignore_index=0, label_smoothing=0.1)


def product(_: Ending, scores: Tensor, targets: Tensor) -> Tensor:
    """Looks for zeros in its backward."""
    return scores.sigmoid().prod(1).mean() + targets.float().mean()


def filled(end: Ending, scores: Tensor, targets: Tensor) -> Tensor:
    """Sums the gradient of what fills."""
    return scores.masked_fill(scores.detach() > 0, end.filling).square().mean() + targets.sum()


class Ending(nn.Module):
    """The last layer of a network, with its loss."""

    weight: Tensor

    def __init__(self, end: End) -> None:
        super().__init__()
        self.end, self.filling = end, nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weight", torch.rand(8) + 0.1)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.end(self, scores, targets)


class Net(nn.Module):
    """Layers, and their loss."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.ending = Ending(end)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.ending(self.layers(x), targets)
        return loss


def call() -> tuple[Tensor, Tensor]:
    return torch.randn(48, 16), torch.randint(8, (48,))


@pytest.mark.parametrize("end", [smoothed, product, filled])
def test_they_have_eagers_bits(end: End) -> None:
    """The module around one runs whole, and the others are planned."""
    torch.manual_seed(1)
    model = Net(end)
    twin = eager_copy(model)
    rk = Rockmate(model, call(), "1MiB", cost="flops")
    assert rk.plan.opaque == ("ending",)
    for _ in range(6):
        x, targets = call()
        for net in (model, twin):
            net.zero_grad()
        loss, expected = rk(x, targets), twin(x, targets)
        assert torch.equal(loss, expected)
        loss.backward(), expected.backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None or theirs.grad is None
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_one_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits under a mode prove nothing where eager has others without."""
    monkeypatch.setattr(watch, "_OTHERWISE_WATCHED", ())
    torch.manual_seed(1)
    with pytest.raises(SelfTestError, match="where a mode watches its operations"):
        Rockmate(Net(product), call(), "1MiB", cost="flops")
