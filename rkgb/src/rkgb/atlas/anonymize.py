"""Recognise equal blocks: graphs that differ only in names (Atools).

Equal blocks are measured and solved once. Two graphs are equal if their operations, attributes and
constants, and the shapes, types and strides of all tensors, agree after values are numbered in
order of appearance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode


@dataclass(frozen=True)
class AnonymousGraph:
    """A graph without names: equal keys mean equal blocks."""

    key: str
    nodes: int

    def __repr__(self) -> str:
        return f"<anonymous graph: {self}>"

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {hashlib.sha1(self.key.encode()).hexdigest()[:10]}"


def anonymize(sg: SimplifiedGraph) -> AnonymousGraph:
    """Return `sg` with every name replaced by a number."""
    return AnonymousGraph(_key(sg, sg.nodes, sg.output_names), len(sg.nodes))


def node_key(sg: SimplifiedGraph, node: SimplifiedNode) -> str:
    """Return a key that is equal for two nodes if one measurement serves both."""
    return _key(sg, (node,), node.outputs)


def equivalence_classes(keys: Sequence[str]) -> list[list[int]]:
    """Return the positions of equal keys, classes in order of first appearance."""
    classes: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        classes.setdefault(key, []).append(index)
    return list(classes.values())


def _key(sg: SimplifiedGraph, nodes: Sequence[SimplifiedNode], outputs: Sequence[str]) -> str:
    numbers: dict[str, int] = {}
    basic = sg.basic
    infos = sg.infos
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
        call += f" with {op.flags}" if op.flags else ""
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
