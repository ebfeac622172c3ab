"""U-Net: a contracting and an expanding path, joined by skip connections at every resolution."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class DoubleConv(nn.Sequential):
    """Two 3×3 convolutions, each with BatchNorm and in-place ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            layers += [
                nn.Conv2d(width, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Images to one logit per pixel and class; height and width must be multiples of 2**depth.

    The skip connections live from the way down to the way up, so the network is no chain: a
    schedule that only knows chains has nothing to cut.
    """

    def __init__(
        self, *, channels: int = 3, num_classes: int = 2, width: int = 64, depth: int = 4
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = DoubleConv(channels, width)
        self.pool = nn.MaxPool2d(2)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(DoubleConv(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(pairs)
        )
        self.merge = nn.ModuleList(DoubleConv(wide, narrow) for narrow, wide in reversed(pairs))
        self.last = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for conv in self.down:
            skips.append(conv(self.pool(skips[-1])))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.last(x)
