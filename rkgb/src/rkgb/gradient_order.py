"""Where gradients must not be summed as they arrive.

Float addition is not associative, and a sum lies in memory like its first term, which decides how
later reductions of it round. So gradients are bit-equal to autograd's only when they are added in
its order: a value's contributions arrive there in reverse program order of its uses (the arguments
of one operation in argument order). We run whole nodes backward, in reverse node order, and views
that belong to a value's own node come last. Values for which the two orders differ are listed here,
and the runner sums their contributions in the right order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rkgb.errors import UnsupportedOpError
from rkgb.simplified import SimplifiedGraph

# One use of a value: (position of the operation in the program, index among its arguments).
Use = tuple[int, int]


@dataclass(frozen=True)
class GradientOrder:
    """Values whose contributions are collected and sorted, and nodes split for their sake."""

    collected: frozenset[str]
    splits: Mapping[int, tuple[int, ...]]  # node -> indices of operations after which to split


def gradient_order(sg: SimplifiedGraph) -> GradientOrder:
    """Compare our order of summation with autograd's for every value of the graph.

    Raises:
        UnsupportedOpError: the right order would need a node to be split before an in-place
            operation on the very value.
    """
    uses: dict[str, list[tuple[Use, int]]] = {}
    for place, node in enumerate(sg.nodes):
        for position, op in zip(node.positions, node.ops, strict=True):
            if not op.grad_enabled or op.target_name == "detach":
                continue
            for index, name in enumerate(op.inputs):
                uses.setdefault(name, []).append(((position, index), place))
    collected: set[str] = set()
    splits: dict[int, list[int]] = {}
    for name, found in uses.items():
        info = sg.dataflow.infos.get(name)
        if name not in sg.producer or info is None or not info.requires_grad:
            continue
        home = sg.producer[name]
        exact = [use for use, _ in sorted(found, key=lambda u: (-u[0][0], u[0][1]))]
        ours = [
            use for use, _ in sorted(found, key=lambda u: (u[1] == home, -u[1], -u[0][0], u[0][1]))
        ]
        if exact == ours:
            continue
        collected.add(name)
        # Uses inside the value's own node are added last. Where they come last in autograd's order
        # too, sorting the others is enough; else the node is split in front of them.
        inside = {use for use, place in found if place == home}
        if inside and set(exact[-len(inside) :]) != inside:
            split = _split_point(sg, home, name)
            early = {use for use in inside if use[0] <= sg.nodes[home].positions[split - 1]}
            if early and set(exact[-len(early) :]) != early:
                raise _refusal(sg, home, name)
            splits.setdefault(home, []).append(split)
    return GradientOrder(
        frozenset(collected), {k: tuple(sorted(set(v))) for k, v in splits.items()}
    )


def _split_point(sg: SimplifiedGraph, place: int, name: str) -> int:
    """Return the index after the operation that gives `name` its last content."""
    node = sg.nodes[place]
    storage = sg.dataflow.infos[name].alias_of
    last = next(i for i, op in enumerate(node.ops) if op.name == name)
    for index, position in enumerate(node.positions):
        if index > last and storage in sg.dataflow.nodes[position].written:
            last = index
    return last + 1


def _refusal(sg: SimplifiedGraph, place: int, name: str) -> UnsupportedOpError:
    op = next(op for op in sg.nodes[place].ops if op.name == name)
    return UnsupportedOpError(
        f"cannot place '{op.target_name}' ({op.module_path or 'root'}, {op.source}): its result is "
        "used more than once, before and after it is overwritten in place, and the order in "
        "which autograd adds its gradients cannot be kept. Replace the in-place operation.",
        op=op.target_name,
        module_path=op.module_path,
        source=op.source,
    )
