"""ResNet-18, -50, -101 and -152 with BatchNorm and in-place ReLU, at any width.

Layers and state-dict keys are those of torchvision's ResNets; `width=64` is the published size.
"""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a residual."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1 convolutions, around a residual."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Return the projection on the residual, or None where shapes agree without one."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, num_classes)."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        width: int = 64,
        num_classes: int = 1000,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = width
        for stage, depth in enumerate(depths):
            stage_width = width * 2**stage
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(inputs, stage_width, stride))
                inputs = stage_width * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(*, width: int = 64, num_classes: int = 1000, channels: int = 3) -> ResNet:
    """Return ResNet-18 (eight basic blocks)."""
    return ResNet(BasicBlock, (2, 2, 2, 2), width=width, num_classes=num_classes, channels=channels)


def resnet50(*, width: int = 64, num_classes: int = 1000, channels: int = 3) -> ResNet:
    """Return ResNet-50 (sixteen bottlenecks)."""
    return ResNet(Bottleneck, (3, 4, 6, 3), width=width, num_classes=num_classes, channels=channels)


def resnet101(*, width: int = 64, num_classes: int = 1000, channels: int = 3) -> ResNet:
    """Return ResNet-101 (thirty-three bottlenecks)."""
    return ResNet(
        Bottleneck, (3, 4, 23, 3), width=width, num_classes=num_classes, channels=channels
    )


def resnet152(*, width: int = 64, num_classes: int = 1000, channels: int = 3) -> ResNet:
    """Return ResNet-152 (fifty bottlenecks)."""
    return ResNet(
        Bottleneck, (3, 8, 36, 3), width=width, num_classes=num_classes, channels=channels
    )
