"""What the models share: an in-place ReLU after another layer, and loading of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

Model = TypeVar("Model", bound=nn.Module)
_INNER = "module."


class ReLUAtEnd(nn.Module):
    """A layer followed by an in-place ReLU, as one stage.

    The ReLU overwrites the layer's output, which saves one tensor. State-dict keys are those of the
    layer alone, so weights load into models with separate layers and back.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        hide_inner_name(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ReLU of the layer's output, computed in place."""
        return functional.relu(self.module(x), inplace=True)


def hide_inner_name(wrapper: nn.Module) -> None:
    """Give a module with a single child called `module` the state-dict keys of that child."""
    wrapper._register_state_dict_hook(_without_inner_name)
    wrapper.register_load_state_dict_pre_hook(_with_inner_name)


def _without_inner_name(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    inner = prefix + _INNER
    for key in [key for key in state_dict if key.startswith(inner)]:
        state_dict[prefix + key.removeprefix(inner)] = state_dict.pop(key)
    versions = getattr(state_dict, "_metadata", {})
    if inner[:-1] in versions:  # the versions follow the keys
        versions[prefix[:-1]] = versions[inner[:-1]]


def _with_inner_name(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any
) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        rest = key.removeprefix(prefix)
        if not rest.startswith(_INNER):
            state_dict[prefix + _INNER + rest] = state_dict.pop(key)


def conv3x3(
    inputs: int, outputs: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """Return a 3 x 3 convolution that keeps the size at stride 1, without bias."""
    return nn.Conv2d(
        inputs,
        outputs,
        3,
        stride=stride,
        padding=dilation,
        groups=groups,
        dilation=dilation,
        bias=False,
    )


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1 x 1 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)


def class_count_of(weights: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the number of classes that torchvision's weights are for."""
    meta = getattr(weights, "meta", None)
    if meta is None or "categories" not in meta:
        return arguments
    count = len(meta["categories"])
    if arguments.get("num_classes", count) != count:
        raise ValueError(
            f"num_classes is {arguments['num_classes']}, and the weights are for {count} classes. "
            f"Leave num_classes out, or load no weights."
        )
    return {**arguments, "num_classes": count}


def load_weights(
    model: Model, weights: Any, progress: bool, renamed: Callable[[str], str] | None = None
) -> Model:
    """Load a state dict, or that of an entry of torchvision's, perhaps with `renamed` keys."""
    if weights is None:
        return model
    if not isinstance(weights, Mapping):
        weights = weights.get_state_dict(progress=progress, check_hash=True)
    if renamed is not None:
        weights = {renamed(key): value for key, value in weights.items()}
    model.load_state_dict(weights)
    return model
