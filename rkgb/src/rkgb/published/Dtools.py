"""From a basic graph to its data flow (D)."""

from __future__ import annotations

from rkgb.graphs.dataflow import B_to_D, DataFlowGraph, DataFlowNode
from rkgb.pictures.render import print_graph as print_D_graph

__all__ = ["B_to_D", "DataFlowGraph", "DataFlowNode", "print_D_graph"]
