"""From the simplified graph to the forward-backward graph with costs (K)."""

from __future__ import annotations

from rkgb.atlas.forward_backward import KComputeNode, KDataNode, KGraph, S_to_K, k_graph
from rkgb.atlas.inspection import Inspection, inspect_model
from rkgb.pictures.render import print_graph as print_K_graph
from rkgb.pictures.render import print_graph_list as print_K_graph_list

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
