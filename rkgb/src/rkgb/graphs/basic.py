"""BasicGraph (B): the raw, ordered operations of one recorded step.

It says what was computed, not what depends on what: it can be printed and run, not drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.errors import TraceError
from rkgb.op import Op, Ref
from rkgb.tensor_info import TensorInfo

# How the gradient of one output lies in memory: its strides, or None where none arrives.
Tangent = tuple[int, ...] | None
# An autocast region: device and type.
Region = tuple[str, torch.dtype]


def ambient_autocast() -> Region | None:
    """Return the autocast region that is active."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    return None


@contextlib.contextmanager
def autocast_as(region: Region | None) -> Iterator[None]:
    """Be in an autocast region, or in none."""
    with contextlib.ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind) and (region is None or region[0] != kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if region is not None and ambient_autocast() != region:
            stack.enter_context(torch.autocast(region[0], dtype=region[1]))
        yield


@dataclass(frozen=True, slots=True)
class BackwardKind:
    """What a recorded backward takes for granted: how gradients lie, the region that it runs in."""

    tangents: tuple[Tangent, ...]
    autocast: Region | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """`value` is one part of the gradient of `leaf`; the autograd node with this number gave it."""

    leaf: str
    value: str
    sequence_nr: int


@dataclass(frozen=True)
class BasicGraph:
    """The operations of a forward and its backward, and where every other name comes from."""

    ops: tuple[Op, ...]  # of the forward
    backward: tuple[Op, ...]
    hand_overs: tuple[HandOver, ...]  # parts of gradients of parameters and inputs, in order
    parameters: Mapping[str, str]  # name of the value -> name in model.named_parameters()
    buffers: Mapping[str, str]  # name of the value -> name in model.named_buffers()
    constants: Mapping[str, Tensor]  # tensors that belong to the graph itself
    inputs: tuple[str | None, ...]  # one per leaf of (args, kwargs); None where it is no tensor
    input_spec: pytree.TreeSpec
    outputs: tuple[Any, ...]  # one per leaf of the result: Ref, or the value itself
    output_spec: pytree.TreeSpec
    infos: Mapping[str, TensorInfo]  # of every value, of forward and backward
    roots: tuple[str, ...]  # outputs from which a gradient can flow back, each once
    kind: BackwardKind  # one tangent per root
    tangent_names: tuple[str | None, ...]  # one per root
    device: torch.device
    model_name: str

    @cached_property
    def externals(self) -> tuple[str, ...]:
        """Values that exist before the forward: parameters, buffers, constants and inputs."""
        names = [*self.parameters, *self.buffers, *self.constants]
        return tuple(dict.fromkeys((*names, *(name for name in self.inputs if name is not None))))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Values that the forward returns, each once, in order."""
        return tuple(dict.fromkeys(out.name for out in self.outputs if isinstance(out, Ref)))

    def __str__(self) -> str:
        lines = [f"{self.model_name}({', '.join(n for n in self.inputs if n)})"]
        lines += [f"  {op}" for op in self.ops]
        return "\n".join([*lines, f"  return {', '.join(map(repr, self.outputs))}"])


def bind_inputs(
    inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for a sample given as a tensor, a tuple of arguments or a dict."""
    keywords = dict(kwargs or {})
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return (), {**inputs, **keywords}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), keywords
    return (inputs,), keywords


def check_device(model: nn.Module, sample: Any, device: torch.device | str | None) -> torch.device:
    """Return the one device that the model and the sample are on.

    Raises:
        TraceError: they are on several devices, or not on the `device` that was asked for.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.setdefault(tensor.device, f"'{name}' of the model")
    for index, leaf in enumerate(pytree.tree_leaves(sample)):
        if isinstance(leaf, Tensor):
            found.setdefault(leaf.device, f"tensor {index} of the sample")
    if len(found) > 1:
        places = " and ".join(f"{where} on {dev}" for dev, where in found.items())
        raise TraceError(
            f"the model and the sample must be on one device, and found {places}. "
            "Move both with .to(device) first."
        )
    only = next(iter(found), torch.device("cpu"))
    if device is not None and torch.device(device).type != only.type:
        raise TraceError(
            f"device {torch.device(device)} was asked for, and the model and sample are on {only}. "
            "Move them with .to(device) first."
        )
    return only


def external_values(
    graph: BasicGraph, model: nn.Module, inputs: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Look every external value up by its name: on the model as it is now, and in `inputs`.

    `inputs` are the leaves of (args, kwargs), flattened.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    values: dict[str, Tensor] = {
        name: parameters[target] for name, target in graph.parameters.items()
    }
    values.update({name: buffers[target] for name, target in graph.buffers.items()})
    values.update(graph.constants)
    values.update(
        {name: leaf for name, leaf in zip(graph.inputs, inputs, strict=True) if name is not None}
    )
    return values
