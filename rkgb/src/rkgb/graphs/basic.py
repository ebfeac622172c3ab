"""BasicGraph (B): the raw, ordered operations of one recorded step.

It is a list without dependencies: it can be printed and run, but not drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rkgb.elements.effect import Effect
from rkgb.elements.numbers import Numbers
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import GradientCut, WholeCall, target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.elements.trees import Structure, flatten
from rkgb.errors import TraceError
from rkgb.guards.sources import Sources
from rkgb.torch_api.tensor_facts import placed_parameters

# The strides of the gradient of one output, or None if the output gets none.
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
    """Run in an autocast region, or in none."""
    with contextlib.ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind) and (region is None or region[0] != kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if region is not None and ambient_autocast() != region:
            stack.enter_context(torch.autocast(region[0], dtype=region[1]))
        yield


@dataclass(frozen=True, slots=True)
class BackwardKind:
    """The conditions of a recorded backward: layouts of tangents, and the autocast region.

    A backward is split if an output is used by other outputs. The backward then passes the parts of
    that output's gradient to autograd, and continues with the sum.
    """

    tangents: tuple[Tangent, ...]
    autocast: Region | None = None
    # If it is split: positions of such outputs that also get a gradient from outside.
    outside: tuple[int, ...] | None = None

    @property
    def is_split(self) -> bool:
        """Whether gradients of outputs that other outputs use pass through autograd."""
        return self.outside is not None

    def of_losses(self) -> BackwardKind:
        """Return the kind in which only scalars get a gradient, or this one if there is no scalar.

        A model that returns its loss beside other outputs is trained by that loss.
        """
        losses = tuple(() if strides == () else None for strides in self.tangents)
        return self if set(losses) <= {None} else BackwardKind(losses, self.autocast)

    def asks_no_more_than(self, other: BackwardKind) -> bool:
        """Return whether each output that gets a gradient gets one in the other kind, too."""
        pairs = zip(self.tangents, other.tangents, strict=True)
        return all(its is not None for own, its in pairs if own is not None)

    @property
    def is_of_losses(self) -> bool:
        """Whether only scalars get a gradient."""
        return all(not strides for strides in self.tangents)

    @property
    def is_of_losses_alone(self) -> bool:
        """Whether only losses get a gradient although other outputs could."""
        return self.is_of_losses and None in self.tangents


@dataclass(frozen=True, slots=True)
class Flow:
    """The outputs that an output was computed from, by position among the roots, and its uses.

    Outputs that it reaches only through another output are left out.
    """

    reaches: tuple[int, ...]
    uses: int  # number of parts of its gradient that the forward's other operations may give


@dataclass(frozen=True, slots=True)
class HandOver:
    """`value` is one part of the gradient of `leaf`, from the autograd node `sequence_nr`."""

    leaf: str
    value: str
    sequence_nr: int


@dataclass(frozen=True, slots=True)
class Read:
    """A value that Python read while recording, or that decided the size of a result: a guard.

    "number": the result of `op`; "size": the shapes of its results; "content": all elements of its
    inputs. All depend only on inputs, buffers and constants.
    """

    kind: Literal["number", "size", "content"]
    op: Op
    position: int  # number of operations of the forward before it
    value: Any

    def __str__(self) -> str:
        place = f"({self.op.module_path or 'root'}, {self.op.source})"
        return f"{self.kind} of {self.op} {place}: {str(self.value)[:60]}"


@dataclass(frozen=True, slots=True)
class Metered:
    """An operation as it was recorded, and the peak of its kernel."""

    op: Op
    peak_bytes: int

    def is_of(self, op: Op) -> bool:
        """Return whether `op` is that operation, not changed to overwrite its input."""
        ours, theirs = ((one.args, one.kwargs, one.writes) for one in (self.op, op))
        return self.op.target is op.target and ours == theirs


@dataclass(frozen=True)
class BasicGraph:
    """The operations of a forward and its backward, and the origin of every other name."""

    ops: tuple[Op, ...]  # of the forward
    backward: tuple[Op, ...]
    hand_overs: tuple[HandOver, ...]  # parts of gradients of parameters and inputs, in order
    parameters: Mapping[str, str]  # name of the value -> path in the model
    buffers: Mapping[str, str]  # name of the value -> name in model.named_buffers()
    constants: Mapping[str, Tensor]  # tensors that belong to the graph itself
    inputs: tuple[str | None, ...]  # one per leaf of (args, kwargs); None if it is no tensor
    input_spec: Structure
    outputs: tuple[Any, ...]  # one per leaf of the result: Ref, or the value itself
    output_spec: Structure
    infos: Mapping[str, TensorInfo]  # of every value, of forward and backward
    roots: tuple[str, ...]  # outputs from which a gradient can flow back, each once
    kind: BackwardKind  # one tangent per root
    tangent_names: tuple[str | None, ...]  # one per root; None for a `GradientCut`
    device: torch.device
    model_name: str
    opaque: tuple[str, ...] = ()  # submodules that are opaque calls
    effects: tuple[Effect, ...] = ()  # if any, the outputs are (result, one value for each)
    reads: tuple[Read, ...] = ()  # guards on values, which each call has to meet
    catches: bool = False  # the forward's Python may catch the error of an operation
    numbers: Numbers | None = None  # unspecialised numbers, if there are any
    flows: tuple[Flow, ...] = ()  # one per root, if there are several
    metered: Mapping[str, Metered] = field(default_factory=dict, compare=False, repr=False)
    # Guards on what Python has read besides the arguments, which each call checks.
    sources: Sources = field(default_factory=Sources, compare=False, repr=False)
    # The leaves of the forward's autograd graph, whichever backward runs: leaf, number of a node.
    leaf_edges: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        return f"<B graph of {self.model_name}: {len(self.ops)} operations>"

    @cached_property
    def edges(self) -> tuple[tuple[str, int], ...]:
        """The edges from autograd nodes to leaves, in the order of eager's backward."""
        return self.leaf_edges or tuple((h.leaf, h.sequence_nr) for h in self.hand_overs)

    def with_edges_as(self, known: BasicGraph) -> BasicGraph:
        """Return the graph with the edges in the order of another recording of the same forward.

        What runs several backwards of one forward knows edges by their position. The engine alone
        decides the order of the leaves of one node, and may have decided otherwise here.

        Raises:
            TraceError: other leaves can get gradients.
        """
        ours, theirs = _by_node(self.edges), _by_node(known.edges)
        if list(map(sorted, ours.values())) != list(map(sorted, theirs.values())):
            raise TraceError(
                f"a backward of {self.model_name} for other gradients leads to other parameters or "
                "inputs than the one that was recorded before. Change modules after the backward."
            )
        pairs = zip(ours, theirs.values(), strict=True)
        edges = tuple((leaf, number) for number, leaves in pairs for leaf in leaves)
        return replace(self, leaf_edges=edges)

    @property
    def whole_calls(self) -> tuple[WholeCall, ...]:
        """The calls of the user's own Python in the forward, in order."""
        found = (target_of(op).whole for op in self.ops)
        return tuple(whole for whole in found if whole is not None)

    @cached_property
    def externals(self) -> tuple[str, ...]:
        """Values that exist before the forward: parameters, buffers, constants and inputs."""
        names = [*self.parameters, *self.buffers, *self.constants]
        return tuple(dict.fromkeys((*names, *(name for name in self.inputs if name is not None))))

    @cached_property
    def written_roots(self) -> frozenset[str]:
        """Storages from before the forward that the step writes to, mostly of buffers."""
        writes = {name for op in (*self.ops, *self.backward) for name in op.writes}
        for whole in self.whole_calls:  # they only say whether they write to their buffers
            if whole.buffer_bytes:
                around = f"{whole.path}." if whole.path else ""
                writes |= {name for name, path in self.buffers.items() if path.startswith(around)}
        found = {self.infos[name].alias_of for name in writes}
        return frozenset(found & {self.infos[name].alias_of for name in self.externals})

    @cached_property
    def written_parameters(self) -> tuple[str, ...]:
        """Parameters that the forward writes to, by their names in the model."""
        roots = {self.infos[name].alias_of for op in self.ops for name in op.writes}
        found = [self.parameters[root] for root in roots if root in self.parameters]
        for whole in self.whole_calls:
            found += whole.written
        return tuple(sorted(set(found)))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Values that the forward returns, each once, in order."""
        return tuple(dict.fromkeys(out.name for out in self.outputs if isinstance(out, Ref)))

    @cached_property
    def leaving_roots(self) -> frozenset[str]:
        """Storages of outputs that the caller is assumed to drop before the backward begins.

        These are the outputs beside the losses of a model, unless the model keeps them itself.
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
        """The operations of the backward that take gradients of outputs back from autograd."""
        return tuple(op for op in self.backward if isinstance(op.target, GradientCut))

    def __str__(self) -> str:
        lines = [f"{self.model_name}({', '.join(n for n in self.inputs if n)})"]
        lines += [f"  {op}" for op in self.ops]
        return "\n".join([*lines, f"  return {', '.join(map(repr, self.outputs))}"])


def _by_node(edges: Sequence[tuple[str, int]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for leaf, number in edges:
        found.setdefault(number, []).append(leaf)
    return found


def external_values(
    graph: BasicGraph, model: nn.Module, inputs: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Return every external value by name, from the present model and `inputs`.

    `inputs` are the leaves of (args, kwargs).
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
