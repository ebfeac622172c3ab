"""Recording a module into a basic graph (B)."""

from rkgb.capture.record import make_B
from rkgb.graphs.basic import BasicGraph

__all__ = ["BasicGraph", "make_B"]
