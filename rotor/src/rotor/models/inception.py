"""Inception v3 as a sequential module, with torchvision's names, outputs and weights.

Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: *Rethinking the inception architecture for computer
vision*, 2015 (arXiv:1512.00567). In training mode the auxiliary classifier runs in the middle. The
later stages pass its logits on beside their tensor, and the network returns both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from rotor.models.utils import class_count_of, hide_inner_name, load_weights

__all__ = ["Inception3", "InceptionOutputs", "inception_v3"]

# A convolution: its name, its output channels, and its kernel, which may be (height, width).
Conv = tuple[str, int, int | tuple[int, int]]
# What a branch does in turn: convolutions one by one, or side by side in a list, or a pooling.
Branch = Sequence[Conv | list[Conv] | str]
# Makes a module from its input channels and torchvision's other arguments.
Maker = Callable[..., nn.Module]


class InceptionOutputs(NamedTuple):
    """What the network returns in training mode."""

    logits: torch.Tensor
    aux_logits: torch.Tensor | None


class BasicConv2d(nn.Module):
    """Convolution, batch normalisation, in-place ReLU."""

    def __init__(self, in_channels: int, out_channels: int, **kwargs: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activated features."""
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Parallel branches of convolutions, concatenated in the given order.

    "avg" stands for average pooling, "max" for the max pooling that halves the size. Beside a
    branch that is "max" alone, the last convolution of each other branch has stride 2 and is not
    padded. All others are padded by half their kernel.
    """

    def __init__(self, inputs: int, *branches: Branch, conv_block: Maker | None = None) -> None:
        super().__init__()
        self.branches = [[_names(step) for step in branch] for branch in branches]
        for branch in branches:
            channels = inputs
            for step in branch:
                halves = ["max"] in branches and step is branch[-1]
                for name, width, kernel in [] if isinstance(step, str) else _convs(step):
                    own = conv_arguments(kernel, 2 if halves else 1)
                    setattr(self, name, (conv_block or BasicConv2d)(channels, width, **own))
                channels = step[1] if isinstance(step, tuple) else channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all branches in one tensor."""
        return torch.cat([self._run(branch, x) for branch in self.branches], 1)

    def _run(self, branch: list[list[str]], x: torch.Tensor) -> torch.Tensor:
        for names in branch:
            if names == ["avg"]:
                x = functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
            elif names == ["max"]:
                x = functional.max_pool2d(x, kernel_size=3, stride=2)
            else:
                made = [getattr(self, name)(x) for name in names]
                x = torch.cat(made, 1) if len(made) > 1 else made[0]
        return x


def _convs(step: Conv | list[Conv]) -> list[Conv]:
    return step if isinstance(step, list) else [step]


def _names(step: Conv | list[Conv] | str) -> list[str]:
    return [step] if isinstance(step, str) else [name for name, *_ in _convs(step)]


def conv_arguments(kernel: int | tuple[int, int], stride: int) -> dict[str, Any]:
    """Return exactly the arguments that torchvision passes: a caller's block may inspect them."""
    arguments: dict[str, Any] = {"kernel_size": kernel}
    if stride != 1:
        return {**arguments, "stride": stride}
    if isinstance(kernel, tuple):
        arguments["padding"] = (kernel[0] // 2, kernel[1] // 2)
    elif kernel != 1:
        arguments["padding"] = kernel // 2
    return arguments


def inception_a(in_channels: int, pool_features: int, conv_block: Maker | None = None) -> Mixed:
    """35 x 35: kernels 1, 5, and 3 twice."""
    return Mixed(
        in_channels,
        [("branch1x1", 64, 1)],
        [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        ["avg", ("branch_pool", pool_features, 1)],
        conv_block=conv_block,
    )


def inception_b(in_channels: int, conv_block: Maker | None = None) -> Mixed:
    """35 x 35 to 17 x 17."""
    return Mixed(
        in_channels,
        [("branch3x3", 384, 3)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        ["max"],
        conv_block=conv_block,
    )


def inception_c(in_channels: int, channels_7x7: int, conv_block: Maker | None = None) -> Mixed:
    """17 x 17: kernels of 7 in one direction at a time."""
    rows, columns, inner = (1, 7), (7, 1), channels_7x7
    single: Branch = [
        ("branch7x7_1", inner, 1),
        ("branch7x7_2", inner, rows),
        ("branch7x7_3", 192, columns),
    ]
    double: Branch = [
        ("branch7x7dbl_1", inner, 1),
        ("branch7x7dbl_2", inner, columns),
        ("branch7x7dbl_3", inner, rows),
        ("branch7x7dbl_4", inner, columns),
        ("branch7x7dbl_5", 192, rows),
    ]
    pool: Branch = ["avg", ("branch_pool", 192, 1)]
    return Mixed(in_channels, [("branch1x1", 192, 1)], single, double, pool, conv_block=conv_block)


def inception_d(in_channels: int, conv_block: Maker | None = None) -> Mixed:
    """17 x 17 to 8 x 8."""
    long: Branch = [
        ("branch7x7x3_1", 192, 1),
        ("branch7x7x3_2", 192, (1, 7)),
        ("branch7x7x3_3", 192, (7, 1)),
        ("branch7x7x3_4", 192, 3),
    ]
    short: Branch = [("branch3x3_1", 192, 1), ("branch3x3_2", 320, 3)]
    return Mixed(in_channels, short, long, ["max"], conv_block=conv_block)


def inception_e(in_channels: int, conv_block: Maker | None = None) -> Mixed:
    """8 x 8: branches that split into rows and columns."""
    rows, columns = (1, 3), (3, 1)
    double: Branch = [
        ("branch3x3dbl_1", 448, 1),
        ("branch3x3dbl_2", 384, 3),
        [("branch3x3dbl_3a", 384, rows), ("branch3x3dbl_3b", 384, columns)],
    ]
    return Mixed(
        in_channels,
        [("branch1x1", 320, 1)],
        [("branch3x3_1", 384, 1), [("branch3x3_2a", 384, rows), ("branch3x3_2b", 384, columns)]],
        double,
        ["avg", ("branch_pool", 192, 1)],
        conv_block=conv_block,
    )


class TransformInput(nn.Module):
    """Rescales images from the normalisation of torchvision's other models to that of Inception."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the image in this network's scale."""
        scale = (0.229 / 0.5, 0.224 / 0.5, 0.225 / 0.5)
        shift = ((0.485 - 0.5) / 0.5, (0.456 - 0.5) / 0.5, (0.406 - 0.5) / 0.5)
        planes = [
            torch.unsqueeze(x[:, c], 1) * factor + offset
            for c, (factor, offset) in enumerate(zip(scale, shift, strict=True))
        ]
        return torch.cat(planes, 1)


class AuxiliaryClassifier(nn.Module):
    """Logits from the middle of the network."""

    def __init__(self, in_channels: int, num_classes: int, conv_block: Maker | None = None) -> None:
        super().__init__()
        self.conv0 = (conv_block or BasicConv2d)(in_channels, 128, kernel_size=1)
        self.conv1 = (conv_block or BasicConv2d)(128, 768, kernel_size=5)
        self.fc = nn.Linear(768, num_classes)
        self.fc.stddev = 0.001  # type: ignore[assignment]  # torchvision's name for it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = functional.avg_pool2d(x, kernel_size=5, stride=3)
        x = functional.adaptive_avg_pool2d(self.conv1(self.conv0(x)), (1, 1))
        return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]


class WithLogits(nn.Module):
    """Returns its input; in training mode also the logits of a classifier on it.

    Its state-dict keys are those of the classifier.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        hide_inner_name(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return x, or x and the logits."""
        return (x, self.module(x)) if self.training else x


class Beside(nn.Module):
    """Runs a layer on a tensor, or on the first of two; the second is returned unchanged.

    Its state-dict keys are those of the layer.
    """

    def __init__(self, module: nn.Module, *, is_last: bool = False) -> None:
        super().__init__()
        self.module = module
        self.is_last = is_last
        hide_inner_name(self)

    def forward(self, x: Any) -> Any:
        """Return the layer's output, and the second tensor if there is one."""
        if isinstance(x, torch.Tensor):
            return self.module(x)
        main, aux = self.module(x[0]), x[1]
        return InceptionOutputs(main, aux) if self.is_last else (main, aux)


DEFAULT_BLOCKS: tuple[Maker, ...] = (
    BasicConv2d,
    inception_a,
    inception_b,
    inception_c,
    inception_d,
    inception_e,
    AuxiliaryClassifier,
)


class Inception3(nn.Sequential):
    """Inception v3 for images of 299 x 299 (75 x 75 at least).

    `inception_blocks` are the constructors of the convolutions, of the blocks A to E and of the
    auxiliary classifier, in this order. They are called as torchvision calls them.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        aux_logits: bool = True,
        transform_input: bool = False,
        inception_blocks: Sequence[Maker] | None = None,
        init_weights: bool = True,
        dropout: float = 0.5,
    ) -> None:
        if inception_blocks is None:
            inception_blocks = DEFAULT_BLOCKS
        if len(inception_blocks) != 7:
            raise ValueError(
                f"length of inception_blocks should be 7 instead of {len(inception_blocks)}"
            )
        conv, block_a, block_b, block_c, block_d, block_e, block_aux = inception_blocks
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if transform_input:
            parts["transform_input"] = TransformInput()
        parts["Conv2d_1a_3x3"] = conv(3, 32, kernel_size=3, stride=2)
        parts["Conv2d_2a_3x3"] = conv(32, 32, kernel_size=3)
        parts["Conv2d_2b_3x3"] = conv(32, 64, kernel_size=3, padding=1)
        parts["maxpool1"] = nn.MaxPool2d(3, stride=2)
        parts["Conv2d_3b_1x1"] = conv(64, 80, kernel_size=1)
        parts["Conv2d_4a_3x3"] = conv(80, 192, kernel_size=3)
        parts["maxpool2"] = nn.MaxPool2d(3, stride=2)
        parts["Mixed_5b"] = block_a(192, pool_features=32)
        parts["Mixed_5c"] = block_a(256, pool_features=64)
        parts["Mixed_5d"] = block_a(288, pool_features=64)
        parts["Mixed_6a"] = block_b(288)
        parts["Mixed_6b"] = block_c(768, channels_7x7=128)
        parts["Mixed_6c"] = block_c(768, channels_7x7=160)
        parts["Mixed_6d"] = block_c(768, channels_7x7=160)
        parts["Mixed_6e"] = block_c(768, channels_7x7=192)
        if aux_logits:
            parts["AuxLogits"] = WithLogits(block_aux(768, num_classes))
        tail: OrderedDict[str, nn.Module] = OrderedDict(
            Mixed_7a=block_d(768),
            Mixed_7b=block_e(1280),
            Mixed_7c=block_e(2048),
            avgpool=nn.AdaptiveAvgPool2d((1, 1)),
            dropout=nn.Dropout(dropout),
            flatten=nn.Flatten(1),
            fc=nn.Linear(2048, num_classes),
        )
        for name, module in tail.items():
            parts[name] = Beside(module, is_last=name == "fc") if aux_logits else module
        super().__init__(parts)
        if init_weights:
            self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                deviation = float(getattr(module, "stddev", 0.1))
                nn.init.trunc_normal_(module.weight, mean=0.0, std=deviation, a=-2, b=2)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)


def inception_v3(*, weights: Any = None, progress: bool = True, **kwargs: Any) -> Inception3:
    """Inception v3; `weights` is a state dict or an entry of torchvision's.

    Torchvision's entries switch `transform_input` on, because they were trained on images in
    another scale.
    """
    arguments = class_count_of(weights, kwargs)
    if weights is not None:
        arguments = {"init_weights": False, **arguments}
        if not isinstance(weights, Mapping):
            arguments = {"transform_input": True, **arguments}
            weights = weights.get_state_dict(progress=progress, check_hash=True)
        if not arguments.get("aux_logits", True):
            weights = {k: v for k, v in weights.items() if not k.startswith("AuxLogits.")}
    return load_weights(Inception3(**arguments), weights, progress)
