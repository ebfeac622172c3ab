"""Skips that are joined on the way up, in pieces of images, beside the same pieces by hand.

The oracle is plain PyTorch in float64: upsampling, `cat` and convolution of one image after the
other, each behind a checkpoint. BatchNorm sees all images.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rockmate.networks.cutting as cutting
from rockmate import Rockmate

IMAGES, PIECES, WIDTH, PIXELS, LEVELS = 8, 4, 8, 32, 2
BUDGET_BYTES, EXACT_BYTES = 1_060_000, 1_330_000


class UNet(nn.Module):
    """Two levels; by hand or whole."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        widths = [WIDTH << level for level in range(LEVELS + 1)]
        pairs = list(itertools.pairwise(widths))
        self.first = self._normed(nn.Conv2d(3, WIDTH, 3, padding=1))
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), self._normed(nn.Conv2d(a, b, 3, padding=1)))
            for a, b in pairs
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in pairs)
        self.norm = nn.ModuleList(nn.BatchNorm2d(a) for a, _ in pairs)
        self.last = nn.Conv2d(WIDTH, 1, 1)

    def _normed(self, conv: nn.Conv2d) -> nn.Module:
        return nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU(inplace=True))

    def forward(self, images: Tensor) -> Tensor:
        skips = [self.first(images)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for level in reversed(range(LEVELS)):
            skip = skips.pop()
            if self.by_hand:
                each = zip(skip.chunk(PIECES), x.chunk(PIECES), [level] * PIECES, strict=True)
                x = torch.cat([checkpoint(self._joined, *of, use_reentrant=False) for of in each])
            else:
                x = self._joined(skip, x, level)
            x = torch.relu_(self.norm[level](x))
        return self.last(x).square().mean()

    def _joined(self, skip: Tensor, x: Tensor, level: int) -> Tensor:
        return self.join[level](torch.cat([skip, self.up[level](x)], dim=1))


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "COUNTS", (PIECES,))


def made(*, by_hand: bool = False) -> tuple[UNet, Tensor]:
    torch.manual_seed(0)
    return UNet(by_hand=by_hand), torch.randn(IMAGES, 3, PIXELS, PIXELS)


@pytest.mark.slow
def test_pieces_are_the_images_that_one_joins_by_hand() -> None:
    """Half of what it needs whole: a `cat` and its gradient are never there."""
    model, images = made()
    theirs, _ = made(by_hand=True)
    rk = Rockmate(model, images, BUDGET_BYTES, cost="flops", split=True)
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= BUDGET_BYTES
    assert [cut.split(":")[1] for cut in rk.plan.cut[:LEVELS]] == [
        f" convolution+cat+convolution (up.{level})" for level in range(LEVELS)
    ]
    theirs.double()
    for module, given in ((rk, images), (theirs, images.double())):
        module(given).backward()
    for (name, ours), expected in zip(model.named_parameters(), theirs.parameters(), strict=True):
        exact = expected.grad
        assert ours.grad is not None, name
        assert exact is not None, name
        near = 1e-5 * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(ours.grad.double(), exact, rtol=0, atol=near, msg=name)


@pytest.mark.slow
def test_exact_pieces_need_no_gradient_of_a_cat() -> None:
    """63 % of what it needs whole: gradients of weights see all images, of one skip at a time."""
    model, images = made()
    theirs, _ = made()
    rk = Rockmate(model, images, EXACT_BYTES, cost="flops", split="exact")
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= EXACT_BYTES
    ours, expected = rk(images), theirs(images)
    ours.backward()
    expected.backward()
    assert torch.equal(ours, expected)
    for (name, own), plain in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None, name
        assert plain.grad is not None, name
        assert torch.equal(own.grad, plain.grad), name
