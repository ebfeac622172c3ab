"""DenseNet as sequential modules, with torchvision's names and weights.

Huang, Liu, van der Maaten, Weinberger: *Densely connected convolutional networks*, 2016
(arXiv:1608.06993). A dense layer returns its input and its new channels in one tensor.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rotor.models.utils import ReLUAtEnd, class_count_of, load_weights

OLD_NAME = re.compile(r"\.(norm|relu|conv)\.([12])\.")

__all__ = ["DenseNet", "densenet121", "densenet161", "densenet169", "densenet201"]


class DenseLayer(nn.Module):
    """Concatenates `growth_rate` new channels to its input."""

    def __init__(self, inputs: int, growth_rate: int, bn_size: int, drop_rate: float) -> None:
        super().__init__()
        width = bn_size * growth_rate
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, growth_rate, 3, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and the new channels after it."""
        narrow = self.conv1(self.relu1(self.norm1(x)))
        new = self.conv2(self.relu2(self.norm2(narrow)))
        if self.drop_rate > 0:
            new = functional.dropout(new, self.drop_rate, training=self.training)
        return torch.cat((x, new), 1)


class DenseNet(nn.Sequential):
    """Dense blocks with transitions between them, then a linear layer.

    `memory_efficient` is accepted and ignored: the schedule decides what is recomputed.
    """

    def __init__(
        self,
        growth_rate: int = 32,
        block_config: Sequence[int] = (6, 12, 24, 16),
        num_init_features: int = 64,
        bn_size: int = 4,
        drop_rate: float = 0,
        num_classes: int = 1000,
        memory_efficient: bool = False,
    ) -> None:
        features: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, num_init_features, 7, stride=2, padding=3, bias=False),
            norm0=ReLUAtEnd(nn.BatchNorm2d(num_init_features)),
            pool0=nn.MaxPool2d(3, stride=2, padding=1),
        )
        width = num_init_features
        for index, count in enumerate(block_config, start=1):
            layers: OrderedDict[str, nn.Module] = OrderedDict()
            for place in range(1, count + 1):
                layers[f"denselayer{place}"] = DenseLayer(width, growth_rate, bn_size, drop_rate)
                width += growth_rate
            features[f"denseblock{index}"] = nn.Sequential(layers)
            if index < len(block_config):
                features[f"transition{index}"] = nn.Sequential(
                    OrderedDict(
                        norm=ReLUAtEnd(nn.BatchNorm2d(width)),
                        conv=nn.Conv2d(width, width // 2, 1, bias=False),
                        pool=nn.AvgPool2d(2, stride=2),
                    )
                )
                width //= 2
        features["norm5"] = ReLUAtEnd(nn.BatchNorm2d(width))
        super().__init__(
            OrderedDict(
                features=nn.Sequential(features),
                avgpool=nn.AdaptiveAvgPool2d((1, 1)),
                flatten=nn.Flatten(1),
                classifier=nn.Linear(width, num_classes),
            )
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


def _densenet(
    growth_rate: int,
    block_config: Sequence[int],
    num_init_features: int,
    *,
    weights: Any = None,
    progress: bool = True,
    **kwargs: Any,
) -> DenseNet:
    """Return a network; `weights` is a state dict or an entry of torchvision's."""
    arguments = class_count_of(weights, kwargs)
    model = DenseNet(growth_rate, block_config, num_init_features, **arguments)
    return load_weights(model, weights, progress, _modern_key)


def _modern_key(key: str) -> str:
    """Return the new name of a key: old files write `norm.1` for the layer `norm1`."""
    return OLD_NAME.sub(r".\1\2.", key)


densenet121 = partial(_densenet, 32, (6, 12, 24, 16), 64)
densenet161 = partial(_densenet, 48, (6, 12, 36, 24), 96)
densenet169 = partial(_densenet, 32, (6, 12, 32, 32), 64)
densenet201 = partial(_densenet, 32, (6, 12, 48, 32), 64)
