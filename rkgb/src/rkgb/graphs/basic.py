"""BasicGraph (B): the raw, ordered operations of one recorded step.

It says what was computed, not what depends on what: it can be printed and run, not drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rkgb.elements.cut import GradientCut
from rkgb.elements.effect import Effect
from rkgb.elements.numbers import Numbers
from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.elements.trees import Structure, flatten
from rkgb.guards.sources import Sources
from rkgb.torch_api.placed import placed_parameters

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
    """What a recorded backward takes for granted: how gradients lie, the region that it runs in.

    Where it is split, the gradient of an output that others were computed from is the whole that
    autograd adds up, and the backward hands it the parts.
    """

    tangents: tuple[Tangent, ...]
    autocast: Region | None = None
    # Where it is split, places of such outputs that get some from outside, too; else None.
    outside: tuple[int, ...] | None = None

    @property
    def is_split(self) -> bool:
        """Whether gradients of outputs that others were computed from go by way of autograd."""
        return self.outside is not None

    def of_losses(self) -> BackwardKind:
        """Return the kind in which only scalars get a gradient; this one where none of them is one.

        A model that returns its loss beside other outputs is trained by that loss.
        """
        losses = tuple(() if strides == () else None for strides in self.tangents)
        return self if set(losses) <= {None} else BackwardKind(losses, self.autocast)

    @property
    def is_of_losses(self) -> bool:
        """Whether only scalars get a gradient."""
        return all(not strides for strides in self.tangents)

    @property
    def is_of_losses_alone(self) -> bool:
        """Whether outputs that could get gradients are left without, since there are losses."""
        return self.is_of_losses and None in self.tangents


@dataclass(frozen=True, slots=True)
class Flow:
    """Which outputs, by place among the roots, an output was computed from, and who uses itself.

    What it was computed from by way of another output is that one's.
    """

    reaches: tuple[int, ...]
    uses: int  # how many parts of its gradient others of the forward may give


@dataclass(frozen=True, slots=True)
class HandOver:
    """`value` is one part of the gradient of `leaf`; the autograd node with this number gave it."""

    leaf: str
    value: str
    sequence_nr: int


@dataclass(frozen=True, slots=True)
class Read:
    """A value that Python, or the size of a result, was taken from while recording.

    "number": what `op` gives; "size": the shapes of the tensors that it makes; "content": all
    elements of what it reads. All depend on inputs, buffers and constants alone.
    """

    kind: Literal["number", "size", "content"]
    op: Op
    position: int  # how many operations of the forward come before it
    value: Any

    def __str__(self) -> str:
        place = f"({self.op.module_path or 'root'}, {self.op.source})"
        return f"{self.kind} of {self.op} {place}: {str(self.value)[:60]}"


@dataclass(frozen=True, slots=True)
class Metered:
    """An operation as it was recorded, and what its kernel took at its highest."""

    op: Op
    peak_bytes: int

    def is_of(self, op: Op) -> bool:
        """Whether an operation of a graph is still that one: some are made to overwrite."""
        ours = self.op
        return ours.target is op.target and (ours.args, ours.kwargs, ours.writes) == (
            op.args,
            op.kwargs,
            op.writes,
        )


@dataclass(frozen=True)
class BasicGraph:
    """The operations of a forward and its backward, and where every other name comes from."""

    ops: tuple[Op, ...]  # of the forward
    backward: tuple[Op, ...]
    hand_overs: tuple[HandOver, ...]  # parts of gradients of parameters and inputs, in order
    parameters: Mapping[str, str]  # name of the value -> path in the model
    buffers: Mapping[str, str]  # name of the value -> name in model.named_buffers()
    constants: Mapping[str, Tensor]  # tensors that belong to the graph itself
    inputs: tuple[str | None, ...]  # one per leaf of (args, kwargs); None where it is no tensor
    input_spec: Structure
    outputs: tuple[Any, ...]  # one per leaf of the result: Ref, or the value itself
    output_spec: Structure
    infos: Mapping[str, TensorInfo]  # of every value, of forward and backward
    roots: tuple[str, ...]  # outputs from which a gradient can flow back, each once
    kind: BackwardKind  # one tangent per root
    tangent_names: tuple[str | None, ...]  # one per root; None where a `GradientCut` takes it, too
    device: torch.device
    model_name: str
    opaque: tuple[str, ...] = ()  # submodules that are run whole
    effects: tuple[Effect, ...] = ()  # with them, the outputs are (result, one value for each)
    reads: tuple[Read, ...] = ()  # what a call must see alike for the recording to hold
    numbers: Numbers | None = None  # of the call, where each call brings its own
    flows: tuple[Flow, ...] = ()  # one per root, if there are several
    metered: Mapping[str, Metered] = field(default_factory=dict, compare=False, repr=False)
    # What Python has read besides the arguments, to be looked at again at each call.
    sources: Sources = field(default_factory=Sources, compare=False, repr=False)
    # What the forward's autograd nodes lead to, whatever backward runs: leaf, and number of a node.
    leaf_edges: tuple[tuple[str, int], ...] = ()

    @cached_property
    def edges(self) -> tuple[tuple[str, int], ...]:
        """The edges from autograd nodes to leaves, in the order in which eager runs along them."""
        return self.leaf_edges or tuple((h.leaf, h.sequence_nr) for h in self.hand_overs)

    @cached_property
    def externals(self) -> tuple[str, ...]:
        """Values that exist before the forward: parameters, buffers, constants and inputs."""
        names = [*self.parameters, *self.buffers, *self.constants]
        return tuple(dict.fromkeys((*names, *(name for name in self.inputs if name is not None))))

    @cached_property
    def written_roots(self) -> frozenset[str]:
        """Memory from before the forward that the step writes to: of buffers, mostly."""
        writes = {name for op in (*self.ops, *self.backward) for name in op.writes}
        for op in self.ops:  # what runs whole says only whether it writes to buffers of its own
            piece = getattr(op.target, "piece", None)
            if piece is not None and piece.buffer_bytes:
                around = f"{piece.call.path}." if piece.call.path else ""
                writes |= {name for name, path in self.buffers.items() if path.startswith(around)}
        found = {self.infos[name].alias_of for name in writes}
        return frozenset(found & {self.infos[name].alias_of for name in self.externals})

    @cached_property
    def written_parameters(self) -> tuple[str, ...]:
        """Parameters that the forward writes to, by their names in the model."""
        roots = {self.infos[name].alias_of for op in self.ops for name in op.writes}
        found = [self.parameters[root] for root in roots if root in self.parameters]
        for op in self.ops:  # what runs whole
            found += getattr(getattr(op.target, "piece", None), "written", ())
        return tuple(sorted(set(found)))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Values that the forward returns, each once, in order."""
        return tuple(dict.fromkeys(out.name for out in self.outputs if isinstance(out, Ref)))

    @cached_property
    def leaving_roots(self) -> frozenset[str]:
        """Memory of outputs that is taken to be let go before the backward begins.

        So do outputs beside the losses that a model is trained by, unless it keeps them itself.
        """
        if not self.kind.is_of_losses_alone:
            return frozenset()
        kept = [n for n, t in zip(self.roots, self.kind.tangents, strict=True) if t is not None]
        if self.effects:
            _, values = self.output_spec.unflatten(self.outputs)
            kept += [out.name for out in flatten(values)[0] if isinstance(out, Ref)]
        roots = {self.infos[name].alias_of for name in self.output_names}
        return frozenset(roots.difference(self.infos[name].alias_of for name in kept))

    @cached_property
    def cuts(self) -> tuple[Op, ...]:
        """The operations of the backward that take gradients of outputs from autograd, in order."""
        return tuple(op for op in self.backward if isinstance(op.target, GradientCut))

    def __str__(self) -> str:
        lines = [f"{self.model_name}({', '.join(n for n in self.inputs if n)})"]
        lines += [f"  {op}" for op in self.ops]
        return "\n".join([*lines, f"  return {', '.join(map(repr, self.outputs))}"])


def external_values(
    graph: BasicGraph, model: nn.Module, inputs: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Look every external value up by its name: on the model as it is now, and in `inputs`.

    `inputs` are the leaves of (args, kwargs), flattened.
    """
    parameters = dict(placed_parameters(model, remove_duplicate=False))
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
