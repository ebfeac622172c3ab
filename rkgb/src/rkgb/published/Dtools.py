"""From a basic graph to its data flow (D)."""

from __future__ import annotations

from pathlib import Path

from rkgb.graphs.dataflow import B_to_D, DataFlowGraph, DataFlowNode
from rkgb.pictures.render import print_graph

__all__ = ["B_to_D", "DataFlowGraph", "DataFlowNode", "print_D_graph"]


def print_D_graph(
    dg: DataFlowGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw one data-flow graph into a file; see `rkgb.print_graph`."""
    return print_graph(dg, name, open, render_format)
