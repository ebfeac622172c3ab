"""ResNet, ResNeXt and Wide ResNet as sequential modules, with torchvision's names and weights.

He, Zhang, Ren, Sun: *Deep residual learning for image recognition*, 2015 (arXiv:1512.03385).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from rotor.models.utils import ReLUAtEnd, class_count_of, conv1x1, conv3x3, load_weights

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "ResNet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]

NormLayer = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and the input, or its projection, added to them."""

    expansion: ClassVar[int] = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: NormLayer | None = None,
    ) -> None:
        super().__init__()
        if groups != 1 or base_width != 64 or dilation != 1:
            raise ValueError(
                f"BasicBlock has one group, base width 64 and no dilation; got {groups}, "
                f"{base_width} and {dilation}. Use Bottleneck."
            )
        norm = norm_layer or nn.BatchNorm2d
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = norm(planes)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and the input, or its projection, added to them."""

    expansion: ClassVar[int] = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = 64,
        dilation: int = 1,
        norm_layer: NormLayer | None = None,
    ) -> None:
        super().__init__()
        norm = norm_layer or nn.BatchNorm2d
        width = int(planes * (base_width / 64.0)) * groups
        self.conv1 = conv1x1(inplanes, width)
        self.bn1 = norm(width)
        self.conv2 = conv3x3(width, width, stride, groups, dilation)
        self.bn2 = norm(width)
        self.conv3 = conv1x1(width, planes * self.expansion)
        self.bn3 = norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(out)
        return result


class ResNet(nn.Sequential):
    """A residual network whose stages are its stem, its blocks and its head."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: NormLayer | None = None,
    ) -> None:
        norm = norm_layer or nn.BatchNorm2d
        dilate = (False, *(replace_stride_with_dilation or (False, False, False)))
        if len(dilate) != 4:
            raise ValueError(
                f"replace_stride_with_dilation has {len(dilate) - 1} elements. Give 3, or None."
            )
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            bn1=ReLUAtEnd(norm(64)),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1),
        )
        inplanes, dilation = 64, 1
        for index, (count, dilated) in enumerate(zip(layers, dilate, strict=True)):
            planes, stride = 64 * 2**index, 1 if index == 0 else 2
            first_dilation = dilation
            if dilated:
                dilation, stride = dilation * stride, 1
            blocks: list[nn.Module] = []
            for position in range(count):
                step = stride if position == 0 else 1
                wide = planes * block.expansion
                shortcut = None
                if position == 0 and (step != 1 or inplanes != wide):
                    shortcut = nn.Sequential(conv1x1(inplanes, wide, step), norm(wide))
                spread = first_dilation if position == 0 else dilation
                blocks.append(
                    block(inplanes, planes, step, shortcut, groups, width_per_group, spread, norm)
                )
                inplanes = wide
            parts[f"layer{index + 1}"] = nn.Sequential(*blocks)
        parts["avgpool"] = nn.AdaptiveAvgPool2d((1, 1))
        parts["flatten"] = nn.Flatten(1)
        parts["fc"] = nn.Linear(inplanes, num_classes)
        super().__init__(parts)
        self._initialise(zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        if zero_init_residual:
            for module in self.modules():
                last = {Bottleneck: "bn3", BasicBlock: "bn2"}.get(type(module))
                if last is not None:
                    nn.init.zeros_(getattr(module, last).weight)


def _resnet(
    block: type[BasicBlock | Bottleneck],
    layers: Sequence[int],
    *,
    weights: Any = None,
    progress: bool = True,
    **kwargs: Any,
) -> ResNet:
    """Return a network; `weights` is a state dict or an entry of torchvision's."""
    model = ResNet(block, layers, **class_count_of(weights, kwargs))
    return load_weights(model, weights, progress)


resnet18 = partial(_resnet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(_resnet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(_resnet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(_resnet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(_resnet, Bottleneck, (3, 8, 36, 3))
resnext50_32x4d = partial(resnet50, groups=32, width_per_group=4)
resnext101_32x8d = partial(resnet101, groups=32, width_per_group=8)
resnext101_64x4d = partial(resnet101, groups=64, width_per_group=4)
wide_resnet50_2 = partial(resnet50, width_per_group=128)
wide_resnet101_2 = partial(resnet101, width_per_group=128)
