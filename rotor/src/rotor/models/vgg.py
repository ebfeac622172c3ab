"""VGG as sequential modules, with torchvision's names and weights.

Simonyan, Zisserman: *Very deep convolutional networks for large-scale image recognition*, 2014
(arXiv:1409.1556).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from rotor.models.utils import ReLUAtEnd, class_count_of, load_weights

__all__ = [
    "VGG",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]

# Convolutions at each of the five resolutions, all as wide as the last line says.
DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Sequential):
    """Convolutional features, then three linear layers."""

    def __init__(
        self,
        features: nn.Module,
        num_classes: int = 1000,
        init_weights: bool = True,
        dropout: float = 0.5,
    ) -> None:
        # Names are torchvision's places: a ReLU is part of the layer before it and leaves a gap.
        classifier = nn.Sequential(
            OrderedDict(
                {
                    "0": ReLUAtEnd(nn.Linear(512 * 7 * 7, 4096)),
                    "2": nn.Dropout(dropout),
                    "3": ReLUAtEnd(nn.Linear(4096, 4096)),
                    "5": nn.Dropout(dropout),
                    "6": nn.Linear(4096, num_classes),
                }
            )
        )
        super().__init__(
            OrderedDict(
                features=features,
                avgpool=nn.AdaptiveAvgPool2d((7, 7)),
                flatten=nn.Flatten(1),
                classifier=classifier,
            )
        )
        if init_weights:
            self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)


def make_features(depths: Sequence[int], batch_norm: bool) -> nn.Sequential:
    """Return the convolutional part, each layer under the number torchvision gives it."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    place, inputs = 0, 3
    for depth, width in zip(depths, WIDTHS, strict=True):
        for _ in range(depth):
            conv = nn.Conv2d(inputs, width, 3, padding=1)
            if batch_norm:
                parts[str(place)] = conv
                parts[str(place + 1)] = ReLUAtEnd(nn.BatchNorm2d(width))
            else:
                parts[str(place)] = ReLUAtEnd(conv)
            place += 3 if batch_norm else 2
            inputs = width
        parts[str(place)] = nn.MaxPool2d(2, stride=2)
        place += 1
    return nn.Sequential(parts)


def _vgg(
    depth: int, batch_norm: bool, *, weights: Any = None, progress: bool = True, **kwargs: Any
) -> VGG:
    """Return a network; `weights` is a state dict or an entry of torchvision's."""
    arguments = class_count_of(weights, kwargs)
    if weights is not None:
        arguments = {**arguments, "init_weights": False}
    model = VGG(make_features(DEPTHS[depth], batch_norm), **arguments)
    return load_weights(model, weights, progress)


vgg11, vgg11_bn = partial(_vgg, 11, False), partial(_vgg, 11, True)
vgg13, vgg13_bn = partial(_vgg, 13, False), partial(_vgg, 13, True)
vgg16, vgg16_bn = partial(_vgg, 16, False), partial(_vgg, 16, True)
vgg19, vgg19_bn = partial(_vgg, 19, False), partial(_vgg, 19, True)
