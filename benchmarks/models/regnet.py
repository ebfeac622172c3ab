"""RegNet-X and -Y: stages of residual bottlenecks with grouped 3×3 convolutions.

Y adds squeeze-and-excitation: each channel is scaled by a factor that its own means determine.
"""

from __future__ import annotations

from torch import Tensor, nn


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> nn.Sequential:
    """Return a convolution without bias and its BatchNorm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Excitation(nn.Module):
    """Scale each channel by a factor in (0, 1), computed from the means of all channels."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.factors = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, squeezed, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(squeezed, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors(x)


class Bottleneck(nn.Module):
    """1×1, grouped 3×3 and 1×1 convolutions around a residual."""

    def __init__(
        self, inputs: int, width: int, stride: int, group_width: int, squeezed: int
    ) -> None:
        super().__init__()
        self.proj = None
        if stride != 1 or inputs != width:
            self.proj = conv_norm(inputs, width, 1, stride, 1)
        self.branch = nn.Sequential(
            conv_norm(inputs, width, 1, 1, 1),
            nn.ReLU(inplace=True),
            conv_norm(width, width, 3, stride, width // group_width),
            nn.ReLU(inplace=True),
            *([Excitation(width, squeezed)] if squeezed else []),
            conv_norm(width, width, 1, 1, 1),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.proj is None else self.proj(x)
        return self.relu(identity + self.branch(x))


class RegNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, num_classes)."""

    def __init__(
        self,
        widths: tuple[int, ...],
        depths: tuple[int, ...],
        group_width: int,
        *,
        num_classes: int = 1000,
        channels: int = 3,
        squeeze: float = 0.0,  # channels of an excitation's middle, of those that enter the block
    ) -> None:
        super().__init__()
        inputs = 32
        self.stem = nn.Sequential(conv_norm(channels, inputs, 3, 2, 1), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        for width, depth in zip(widths, depths, strict=True):
            for index in range(depth):
                stride, squeezed = 2 if index == 0 else 1, round(squeeze * inputs)
                blocks.append(Bottleneck(inputs, width, stride, group_width, squeezed))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


def regnet_x_200mf(num_classes: int = 1000) -> RegNet:
    """Return RegNet-X at 200 million multiply-adds for a 224×224 image."""
    return RegNet((24, 56, 152, 368), (1, 1, 4, 7), 8, num_classes=num_classes)


def regnet_x_3_2gf(num_classes: int = 1000) -> RegNet:
    """Return RegNet-X at 3.2 billion multiply-adds, the size in the Rockmate paper."""
    return RegNet((96, 192, 432, 1008), (2, 6, 15, 2), 48, num_classes=num_classes)


def regnet_y_1_6gf(num_classes: int = 1000) -> RegNet:
    """Return RegNet-Y at 1.6 billion multiply-adds, the size in the Rockmate paper."""
    return RegNet((48, 120, 336, 888), (2, 6, 17, 2), 24, num_classes=num_classes, squeeze=0.25)
