"""From the simplified graph to the forward-backward graph with costs (K)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rkgb.costs.forward_backward import KComputeNode, KDataNode, KGraph, S_to_K, k_graph
from rkgb.costs.inspection import Inspection, inspect_model
from rkgb.pictures.render import print_graph

__all__ = [
    "Inspection",
    "KComputeNode",
    "KDataNode",
    "KGraph",
    "S_to_K",
    "inspect_model",
    "k_graph",
    "print_K_graph",
    "print_K_graph_list",
]


def print_K_graph(
    kg: KGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw one forward-backward graph into a file; see `rkgb.print_graph`."""
    return print_graph(kg, name, open, render_format)


def print_K_graph_list(
    list_kg: Sequence[KGraph],
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw the graphs of a list of blocks into a file; see `rkgb.print_graph`."""
    return print_graph(list_kg, name, open, render_format)
