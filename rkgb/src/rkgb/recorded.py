"""The autograd graph of one recorded piece, and the ways to run its backward.

torch's engine sets up a task for every call, which costs several times what a small operation does.
Where no gradient has to be added to another, calling the graph's nodes one after the other gives
the same bits; where one has, or where the nodes cannot be called, the engine is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from rkgb.gradient_order import Use

Leaf = tuple[bool, str, Use, Tensor]  # (is_external, name, use, leaf)


@dataclass(frozen=True, slots=True)
class _Send:
    """Where one result of a visited node goes, and what the engine would make of it first."""

    place: int  # which result
    visit: int  # the visit that takes it; -1: it is the gradient of a leaf
    slot: int  # which gradient of that visit, or which leaf
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Visit:
    gradients: int  # how many gradients the node takes
    sends: tuple[_Send, ...]


@dataclass(frozen=True, slots=True)
class DirectCalls:
    """The nodes of a graph in the engine's order, when each gradient has exactly one source."""

    roots: tuple[tuple[int, int], ...]  # per output: the visit of its node, and which gradient
    visits: tuple[_Visit, ...]
    leaves: int

    @classmethod
    def of(cls, results: Sequence[Tensor], leaves: Sequence[Leaf]) -> DirectCalls | None:
        """Return how to call the graph that made `results`; None where the engine is needed."""
        nodes = _reachable([result.grad_fn for result in results])
        if nodes is None:
            return None
        order = {node: place for place, node in enumerate(nodes)}
        leaf_places = {id(leaf[-1]): place for place, leaf in enumerate(leaves)}
        roots = [(order[result.grad_fn], result.output_nr) for result in results]
        taken = [*roots]
        visits = []
        for node in nodes:
            sends = []
            for place, (source, slot) in enumerate(node.next_functions):
                if source is None:
                    continue
                if source in order:
                    target, wanted = (order[source], slot), source._input_metadata[slot]
                elif id(source.variable) in leaf_places:
                    target, wanted = (-1, leaf_places[id(source.variable)]), source.variable
                else:
                    return None
                taken.append(target)
                sends.append(_Send(place, *target, torch.Size(wanted.shape), wanted.dtype))
            visits.append(_Visit(len(node._input_metadata), tuple(sends)))
        if len(set(taken)) < len(taken):
            return None  # a second gradient for the same tensor: the engine adds them
        if sum(visit < 0 for visit, _ in taken) < len(leaves):
            return None
        return cls(tuple(roots), tuple(visits), len(leaves))

    def __call__(
        self, edges: list[GradientEdge], held: list[Any], gradients: list[Tensor]
    ) -> list[Tensor | None] | None:
        """Return the gradients of the leaves, or None if the engine must be asked after all.

        All three lists are emptied on success: every node and every gradient is dropped as soon as
        nothing needs it.
        """
        waiting: list[Any] = [None] * len(self.visits)
        given: list[list[Tensor | None]] = [[None] * visit.gradients for visit in self.visits]
        for place, (number, slot) in enumerate(self.roots):
            waiting[number] = edges[place].node
            given[number][slot] = gradients[place]
        found: list[Tensor | None] = [None] * self.leaves
        for number, visit in enumerate(self.visits):
            node = waiting[number]
            made = node(*given[number])
            if not isinstance(made, tuple):
                made = (made,)
            if number == 0:
                # Inside an outer autograd.grad(inputs=...) a node believes that the outer engine
                # does not need its results and leaves them out.
                if any(made[send.place] is None for send in visit.sends):
                    return None
                edges.clear()
                held.clear()
                gradients.clear()
            given[number].clear()
            waiting[number] = None
            sources = node.next_functions
            del node
            gradient: Tensor | None
            for send in visit.sends:
                gradient = _as_wanted(made[send.place], send)
                if send.visit < 0:
                    found[send.slot] = gradient
                else:
                    given[send.visit][send.slot] = gradient
                    waiting[send.visit] = sources[send.place][0]
            gradient = None
            del made, sources
        return found


def _reachable(roots: Sequence[Any]) -> list[Any] | None:
    """Return the nodes between `roots` and the leaves, latest first; None if one is special."""
    stack = list(dict.fromkeys(roots))
    seen = set(stack)
    for node in stack:  # grows while it is walked
        metadata = getattr(node, "_input_metadata", None)
        if metadata is None or isinstance(node, BackwardCFunction) or node.name() == "CopySlices":
            return None
        for source, _ in node.next_functions:
            if source is not None and source not in seen and not hasattr(source, "variable"):
                seen.add(source)
                stack.append(source)
    return sorted(stack, key=lambda node: -int(node._sequence_nr()))


def _as_wanted(gradient: Tensor | None, send: _Send) -> Tensor | None:
    # What the engine does between two nodes: undo broadcasting and promotion.
    if gradient is None:
        return None
    if gradient.shape != send.shape:
        gradient = gradient.sum_to_size(send.shape)
    if gradient.dtype != send.dtype:
        if gradient.is_complex() and not send.dtype.is_complex:
            gradient = gradient.real
        gradient = gradient.to(send.dtype)
    return gradient


class _Handover(torch.autograd.Function):
    """Feeds gradients to a graph of several operations from inside the engine.

    Gradients given to `torch.autograd.grad` are held until it returns; these are moved, and freed
    like eager's as soon as the operation that reads them has run.
    """

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.box = box
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        grads = (None, *ctx.box)
        ctx.box.clear()
        return grads


@dataclass(slots=True)
class Recorded:
    """One recording of a piece."""

    out_edges: list[tuple[str, GradientEdge]]
    leaves: list[Leaf]  # in the order in which their gradients are summed
    box: list[Tensor]
    handover: GradientEdge | None  # of a graph of several operations without direct calls
    direct: DirectCalls | None

    def run(self, edges: list[GradientEdge], grads: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all leaves; the graph and both lists are given up."""
        whole = len(edges) == len(self.out_edges)
        if self.direct is not None and whole:
            made = self.direct(edges, self.out_edges, grads)
            if made is not None:
                return made
        inputs = [leaf for *_, leaf in self.leaves]
        if self.handover is not None and whole:
            self.box.extend(grads)
            grads.clear()
            root = torch.empty(0, dtype=self.box[0].dtype, device=self.box[0].device)
            return list(torch.autograd.grad([self.handover], inputs, [root], allow_unused=True))
        found = torch.autograd.grad(edges, inputs, grads, allow_unused=True)
        grads.clear()
        return list(found)


def record_outputs(
    results: Sequence[tuple[str, Tensor]], leaves: list[Leaf], *, direct: DirectCalls | None
) -> Recorded:
    """Return the recording whose differentiable outputs are `results`, by name."""
    edges = [(name, edge_of(result)) for name, result in results]
    box: list[Tensor] = []
    handover = None
    if direct is None and results:
        with torch.enable_grad():
            tensors = [result for _, result in results]
            handover = edge_of(_Handover.apply(box, *tensors))  # type: ignore[no-untyped-call]
    return Recorded(edges, leaves, box, handover, direct)


def edge_of(result: Tensor) -> GradientEdge:
    """Do what get_gradient_edge does for a tensor that is no leaf, without its checks."""
    assert result.grad_fn is not None
    return GradientEdge(result.grad_fn, result.output_nr)
