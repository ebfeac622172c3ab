"""From the data flow to the simplified graph (S), pass by pass, and its blocks."""

from __future__ import annotations

from rkgb.graphs.passes import PASSES, Groups, Pass
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, SimplifiedNode, cut
from rkgb.pictures.render import print_graph as print_S_graph
from rkgb.pictures.render import print_graph_list as print_S_graph_list

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
