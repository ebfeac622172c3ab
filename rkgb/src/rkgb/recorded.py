"""The autograd graph of one recorded piece, and the ways to record it and to run its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rkgb.compile_node import Input, Piece, lookup
from rkgb.direct_calls import DirectCalls
from rkgb.generated import define
from rkgb.saved import SavedView, SavingHooks


@dataclass(frozen=True, slots=True)
class Layout:
    """What is the same at every recording of a piece: shapes and strides are those of the sample.

    Found out by recording the piece once.
    """

    outputs: tuple[tuple[str, int], ...]  # differentiable: name, and which result of its node
    leaves: tuple[Input, ...]  # in the order in which their gradients are summed
    saved: tuple[SavedView | None, ...]  # per saved tensor; None: it is in nobody's table
    direct: DirectCalls | None  # how to run the backward without the engine


@dataclass(slots=True)
class Recorded:
    """One recording of a piece."""

    layout: Layout
    nodes: list[Any]  # autograd's node behind each differentiable output
    leaves: list[Tensor]
    box: list[Tensor]
    handover: Tensor | None  # root of a graph of several operations without direct calls

    def run(self, places: Sequence[int], grads: list[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of all leaves, for `grads` of the outputs at `places`.

        The graph and the list of gradients are given up.
        """
        layout, whole = self.layout, len(places) == len(self.nodes)
        if whole and layout.direct is not None:
            made = layout.direct(self.nodes, grads)
            if made is not None:
                return made
        if whole and self.handover is not None:
            self.box.extend(grads)
            grads.clear()
            seed = self.handover.detach()
            return torch.autograd.grad([self.handover], self.leaves, [seed], allow_unused=True)
        edges = [GradientEdge(self.nodes[place], layout.outputs[place][1]) for place in places]
        found = torch.autograd.grad(edges, self.leaves, grads, allow_unused=True)
        grads.clear()
        return found


def recorded(layout: Layout, results: Sequence[Tensor], leaves: list[Tensor]) -> Recorded:
    """Return the recording whose differentiable outputs are `results`."""
    box: list[Tensor] = []
    handover = None
    if layout.direct is None and results:
        with torch.enable_grad():
            handover = _Handover.apply(box, *results)  # type: ignore[no-untyped-call]
    return Recorded(layout, [result.grad_fn for result in results], leaves, box, handover)


# Takes the table of values, the externals and the hooks of the step; puts the outputs into the
# table. To be called with grad mode enabled.
Record = Callable[[dict[str, Tensor], Mapping[str, Tensor], SavingHooks], Recorded]


def write_record(piece: Piece, layout: Layout, empty: Callable[[str], Tensor]) -> Record:
    """Return the function that records `piece` again; `empty` gives an empty tensor like a value.

    Leaves lose their data afterwards: the graph must not own its inputs.
    """
    scope = dict(piece.scope)
    scope |= {"layout": layout, "Recorded": Recorded, "recorded": recorded, "saved": layout.saved}
    scope["push"] = torch._C._autograd._push_saved_tensors_default_hooks
    scope["pop"] = torch._C._autograd._pop_saved_tensors_default_hooks
    variable = {entry: f"u{place}" for place, entry in enumerate(piece.inputs)}
    leaves = [variable[entry] for entry in layout.leaves]
    lines = []
    for place, entry in enumerate(piece.inputs):
        text = lookup(entry, place)
        if entry in layout.leaves:
            text += ".detach().requires_grad_()"
        elif not entry.is_external:
            text += ".detach()"
        lines.append(f"u{place} = {text}")
    if layout.saved:
        lines += ["hooks.plan[0] = iter(saved)", "push(hooks.pack, hooks.unpack)", "try:"]
        lines += [f"    {line}" for line in piece.body]
        lines += ["finally: pop()"]
    else:
        lines += piece.body
    for place, result in enumerate(piece.results):
        lines.append(f"values[out{place}] = {result}.detach()")
    results = [piece.results[piece.outputs.index(name)] for name, _ in layout.outputs]
    if layout.direct is not None or not results:
        nodes = ", ".join(f"{result}.grad_fn" for result in results)
        made = f"Recorded(layout, [{nodes}], [{', '.join(leaves)}], [], None)"
    else:
        made = f"recorded(layout, [{', '.join(results)}], [{', '.join(leaves)}])"
    lines.append(f"made = {made}")
    for place, entry in enumerate(layout.leaves):
        if not entry.is_external:
            scope[f"empty{place}"] = empty(entry.name)
            lines.append(f"{leaves[place]}.data = empty{place}")
    return define("record(values, external, hooks)", [*lines, "return made"], scope)


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
