"""From the data flow to the simplified graph (S), pass by pass, and its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rkgb.graphs.passes import PASSES, Groups, Pass
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, SimplifiedNode, cut
from rkgb.pictures.render import print_graph

__all__ = [
    "PASSES",
    "D_to_S",
    "Groups",
    "Pass",
    "SimplifiedGraph",
    "SimplifiedNode",
    "cut",
    "print_S_graph",
    "print_S_graph_list",
]


def print_S_graph(
    sg: SimplifiedGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw one simplified graph into a file; see `rkgb.print_graph`."""
    return print_graph(sg, name, open, render_format)


def print_S_graph_list(
    list_sg: Sequence[SimplifiedGraph],
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw a list of blocks into a file; see `rkgb.print_graph`."""
    return print_graph(list_sg, name, open, render_format)
