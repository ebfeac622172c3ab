"""DataFlowGraph (D): the forward as a DAG, one node per operation, with facts about each value.

The recording says which results share storage with inputs, which values require a gradient, and
which operations draw random numbers or write to memory. The edges are derived from these facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import torch
from torch import nn

from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.uses import before_each

# What draws graphs lies above, and is put here when it is imported.
_by: list[Callable[[Any], str | None]] = []


def draw_by(draw: Callable[[Any], str | None]) -> None:
    """Let notebooks show graphs by a function, which returns None where it cannot draw."""
    _by[:] = [draw]


class Drawn:
    """Something that a notebook shows as a picture, below its line of text."""

    def _repr_html_(self) -> str:
        pictures = [draw(self) for draw in _by]
        return f"<p>{escape(repr(self))}</p>{''.join(filter(None, pictures))}"


@dataclass(frozen=True, slots=True)
class DataFlowNode:
    """One operation and what it must follow.

    `order_deps` are indices of nodes that must run before it although it reads none of their
    results: readers of memory that it overwrites, and the random operation before it.
    """

    op: Op
    deps: tuple[int, ...]
    order_deps: tuple[int, ...]
    written: tuple[str, ...]  # names of the storages it overwrites: values or buffers


@dataclass(frozen=True)
class DataFlowGraph(Drawn):
    """The forward as a DAG over single operations, in program order."""

    basic: BasicGraph
    nodes: tuple[DataFlowNode, ...]

    def __repr__(self) -> str:
        return f"<D graph of {self.basic.model_name}: {len(self.nodes)} nodes>"

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Facts about every value."""
        return self.basic.infos

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that makes each value."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.op.results if name}

    def __str__(self) -> str:
        lines = []
        for node in self.nodes:
            info = self.infos.get(node.op.name)
            marks = " random" if node.op.is_random else ""
            marks += f" writes {', '.join(node.written)}" if node.written else ""
            shares = f" = {info.alias_of}" if info and info.alias_of != node.op.name else ""
            place = f"({node.op.module_path or 'root'}, {node.op.source})"
            lines.append(f"{node.op}  # {info or 'nothing'}{shares}{marks} {place}")
        return "\n".join(lines)


def B_to_D(
    bg: BasicGraph,
    model: nn.Module | None = None,
    inputs: Any = None,
    device: torch.device | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> DataFlowGraph:
    """Return the data-flow graph of a recorded step.

    Only `bg` is used: nothing is run. The other arguments belong to the published signature.
    """
    nodes = []
    for op, before in zip(bg.ops, before_each(bg.infos, bg.ops), strict=True):
        written = tuple(dict.fromkeys(bg.infos[name].alias_of for name in op.writes))
        nodes.append(
            DataFlowNode(op, tuple(sorted(before.data)), tuple(sorted(before.order)), written)
        )
    return DataFlowGraph(bg, tuple(nodes))
