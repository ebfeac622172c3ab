"""BasicGraph (B): the raw, ordered assignments of a captured forward.

It says what is computed, not what depends on what: it can be printed and run, not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.errors import TraceError
from rkgb.op import Op, Ref, map_refs
from rkgb.trace import Trace, capture


@dataclass(frozen=True)
class BasicGraph:
    """Flat assignments of a forward, and where every other name in them comes from."""

    ops: tuple[Op, ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: tuple[str | None, ...]
    input_spec: pytree.TreeSpec
    outputs: tuple[Any, ...]
    output_spec: pytree.TreeSpec
    model_name: str

    @property
    def externals(self) -> tuple[str, ...]:
        """Values that exist before the forward: parameters, buffers, constants and inputs."""
        names = [*self.parameters, *self.buffers, *self.constants]
        return (*names, *(name for name in self.inputs if name is not None))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Values that the forward returns, each once, in order."""
        return tuple(dict.fromkeys(out.name for out in self.outputs if isinstance(out, Ref)))

    def __str__(self) -> str:
        lines = [f"{self.model_name}({', '.join(n for n in self.inputs if n)})"]
        lines += [f"  {op}" for op in self.ops]
        return "\n".join([*lines, f"  return {', '.join(map(repr, self.outputs))}"])


def make_B(
    model: nn.Module,
    inputs: Any,
    device: torch.device | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> BasicGraph:
    """Capture `model` on sample `inputs` (a tensor, a tuple of arguments, or a dict of keywords).

    The model is captured in the mode (train or eval) that it is in, and is not changed. `device`
    is only checked: the model and the inputs must be on it already.

    Raises:
        TraceError: see `rkgb.trace.capture`; or the devices differ.
    """
    args, keywords = bind_inputs(inputs, kwargs)
    check_device(model, (args, keywords), device)
    trace: Trace = capture(model, args, keywords)
    return BasicGraph(
        ops=trace.ops,
        parameters=trace.parameters,
        buffers=trace.buffers,
        constants=trace.constants,
        inputs=trace.inputs,
        input_spec=trace.input_spec,
        outputs=trace.outputs,
        output_spec=trace.output_spec,
        model_name=type(model).__name__,
    )


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


def run_op(op: Op, values: Mapping[str, Any]) -> Any:
    """Run one operation on `values`, in the grad and autocast mode of its place."""
    args = map_refs(op.args, values.__getitem__)
    kwargs = map_refs(op.kwargs, values.__getitem__)
    if op.autocast is None and op.grad_enabled:
        return op.target(*args, **kwargs)
    with torch.set_grad_enabled(op.grad_enabled and torch.is_grad_enabled()):
        if op.autocast is None:
            return op.target(*args, **kwargs)
        cast = op.autocast
        with torch.autocast(
            cast.device, dtype=cast.dtype, enabled=cast.enabled, cache_enabled=False
        ):
            return op.target(*args, **kwargs)
