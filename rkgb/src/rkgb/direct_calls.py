"""Run the backward of a small autograd graph by calling its nodes, without torch's engine.

The engine sets up a task for every call, which costs several times what a small operation does.
Where no gradient has to be added to another, calling the nodes one after the other gives the same
bits. The calls are generated source: one line per node, and every gradient is a local variable that
is deleted as soon as nothing needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from rkgb.generated import define


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


# Takes the nodes that made the outputs and the outputs' gradients, and returns the gradients of the
# leaves, or None if the engine must be asked after all. On success both lists are emptied.
DirectCalls = Callable[[list[Any], list[Tensor]], tuple[Tensor | None, ...] | None]


def direct_calls(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> DirectCalls | None:
    """Return how to run the backward of graphs like the one that made `results` from `leaves`.

    None where the engine is needed: a tensor gets a second gradient, a leaf gets none, or a node is
    none of torch's own.
    """
    nodes = _reachable([result.grad_fn for result in results])
    if nodes is None:
        return None
    order = {node: place for place, node in enumerate(nodes)}
    leaf_places = {id(leaf): place for place, leaf in enumerate(leaves)}
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
    return _write(roots, visits, len(leaves))


def _write(
    roots: Sequence[tuple[int, int]], visits: Sequence[_Visit], leaves: int
) -> Callable[..., Any]:
    scope: dict[str, Any] = {"as_wanted": _as_wanted}
    known = {number for number, _ in roots}  # visits whose node is in a variable
    given = set(roots)  # gradients that are in a variable
    lines = []
    for place, (number, slot) in enumerate(roots):
        lines.append(f"n{number} = nodes[{place}]; g{number}_{slot} = grads[{place}]")
    for number, visit in enumerate(visits):
        takes = [
            f"g{number}_{slot}" if (number, slot) in given else "None"
            for slot in range(visit.gradients)
        ]
        lines.append(f"made = n{number}({', '.join(takes)})")
        lines.append("if made.__class__ is not tuple: made = (made,)")
        if number == 0:
            # Inside an outer autograd.grad(inputs=...) a node believes that the outer engine does
            # not need its results and leaves them out.
            missing = " or ".join(f"made[{send.place}] is None" for send in visit.sends)
            lines.append(f"if {missing or False}: return None")
            lines += ["nodes.clear()", "grads.clear()"]
        new = {send.visit for send in visit.sends if send.visit >= 0} - known
        done = ["made"]
        if new:
            lines.append(f"sources = n{number}.next_functions")
            done.append("sources")
        lines.append(f"del {', '.join([f'n{number}', *(t for t in takes if t != 'None')])}")
        for send in visit.sends:
            name = f"leaf{send.slot}" if send.visit < 0 else f"g{send.visit}_{send.slot}"
            size, kind = f"size{number}_{send.place}", f"kind{number}_{send.place}"
            scope[size], scope[kind] = send.shape, send.dtype
            lines.append(f"{name} = made[{send.place}]")
            lines.append(
                f"if {name} is not None and ({name}.shape != {size} or {name}.dtype is not {kind}):"
                f" {name} = as_wanted({name}, {size}, {kind})"
            )
            if send.visit >= 0:
                given.add((send.visit, send.slot))
                if send.visit in new:
                    new.remove(send.visit)
                    known.add(send.visit)
                    lines.append(f"n{send.visit} = sources[{send.place}][0]")
        lines.append(f"del {', '.join(done)}")
    found = "".join(f"leaf{place}, " for place in range(leaves))
    return define("backward(nodes, grads)", [*lines, f"return ({found})"], scope)


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


def _as_wanted(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    # What the engine does between two nodes: undo broadcasting and promotion.
    if gradient.shape != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype != dtype:
        if gradient.is_complex() and not dtype.is_complex:
            gradient = gradient.real
        gradient = gradient.to(dtype)
    return gradient
