"""Recognise equal blocks: graphs that differ in nothing but names (Atools).

Equal blocks are measured and solved once. Two graphs are equal when their operations, attributes,
constants and the shapes, types and strides of all tensors agree once values are numbered in order
of appearance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rkgb.op import Op, Ref
from rkgb.simplified import SimplifiedGraph, SimplifiedNode

if TYPE_CHECKING:
    from rkgb.backward import KGraph
    from rkgb.costs.inspection import CostChoice


@dataclass(frozen=True)
class AnonymousGraph:
    """A graph without names: equal keys mean equal blocks."""

    key: str
    nodes: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {hashlib.sha1(self.key.encode()).hexdigest()[:10]}"


def anonymize(sg: SimplifiedGraph) -> AnonymousGraph:
    """Return what is left of `sg` when every name is replaced by a number."""
    return AnonymousGraph(_key(sg, sg.nodes, sg.output_names), len(sg.nodes))


def node_key(sg: SimplifiedGraph, node: SimplifiedNode) -> str:
    """Return a key that two nodes share when one measurement serves both."""
    return _key(sg, (node,), node.outputs)


def equivalence_classes(keys: Sequence[str]) -> list[list[int]]:
    """Return the positions of equal keys, classes in order of first appearance."""
    classes: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        classes.setdefault(key, []).append(index)
    return list(classes.values())


def S_list_to_K_list_eco(
    list_sg: Sequence[SimplifiedGraph],
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    cost: CostChoice = "measured",
) -> tuple[list[list[int]], list[KGraph], list[AnonymousGraph]]:
    """Return (classes of equal pieces, one KGraph per piece, the anonymous graphs).

    Equal pieces are measured once, on random values of the recorded shapes unless `inputs` are
    given; `cost` is that of `make_all_graphs`.
    """
    from rkgb.backward import S_to_K

    anonymous = [anonymize(sg) for sg in list_sg]
    classes = equivalence_classes([graph.key for graph in anonymous])
    graphs: dict[int, KGraph] = {}
    for members in classes:
        first = list_sg[members[0]]
        measured = S_to_K(first, model, device, inputs=inputs, kwargs=kwargs, cost=cost)
        for index in members:
            graphs[index] = measured.renamed(list_sg[index])
    return classes, [graphs[index] for index in range(len(list_sg))], anonymous


def _key(sg: SimplifiedGraph, nodes: Sequence[SimplifiedNode], outputs: Sequence[str]) -> str:
    numbers: dict[str, int] = {}
    basic = sg.dataflow.basic
    infos = sg.dataflow.infos
    lines: list[str] = []

    def number(name: str) -> str:
        if name not in numbers:
            numbers[name] = len(numbers)
            lines.append(f"{numbers[name]}: {describe(name)}")
        return f"#{numbers[name]}"

    def describe(name: str) -> str:
        if name in basic.parameters:
            kind = "parameter"
        elif name in basic.buffers:
            kind = "buffer"
        elif name in basic.constants:
            kind = f"constant {_content(basic.constants[name])}"
        elif name in basic.inputs:
            kind = "input"
        else:
            kind = "value"
        info = infos.get(name)
        return f"{kind} {info} {info.stride}" if info is not None else kind

    def text(tree: Any) -> str:
        if isinstance(tree, Ref):
            return number(tree.name)
        if isinstance(tree, (list, tuple)):
            return f"[{', '.join(text(item) for item in tree)}]"
        if isinstance(tree, Mapping):
            return f"{{{', '.join(f'{key}={text(value)}' for key, value in tree.items())}}}"
        return repr(tree)

    def line(op: Op) -> str:
        call = f"{op.target}({text(op.args)}, {text(op.kwargs)})"
        return f"{', '.join(number(name) if name else '_' for name in op.results)} = {call}"

    for node in nodes:
        lines.append(f"node{' random' if node.is_random else ''}")
        lines.extend(line(op) for op in node.ops)
        lines.append("backward")
        lines.extend(line(op) for op in node.backward)
        lines.extend(f"gives {number(h.leaf)} {number(h.value)}" for h in node.hand_overs)
    lines.append(f"return {', '.join(number(name) for name in outputs)}")
    return "\n".join(lines)


def _content(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    return hashlib.sha1(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
