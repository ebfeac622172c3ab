"""The graphs as data: B (the recording), D (data flow), S (what is planned).

Gets a recorded step made of `elements`; gives frozen graphs that can be printed, cut and compared.
Read basic.py, uses.py (hazards, last uses, dead code), dataflow.py, then simplified.py with
passes.py and backward_slices.py. The blocks of `cut` are for pictures and follow only the forward.
rockmate cuts its problem, which also has the backward and the live ranges.
"""

from rkgb.graphs.basic import (
    BackwardKind,
    BasicGraph,
    Flow,
    Region,
    Tangent,
    ambient_autocast,
    autocast_as,
)
from rkgb.graphs.differences import (
    Difference,
    forward_differences,
    same_but_for_numbers,
    same_but_for_sizes,
)
from rkgb.graphs.passes import PLANNED_PASSES
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode

__all__ = [
    "PLANNED_PASSES",
    "BackwardKind",
    "BasicGraph",
    "Difference",
    "Flow",
    "Region",
    "SimplifiedGraph",
    "SimplifiedNode",
    "Tangent",
    "ambient_autocast",
    "autocast_as",
    "forward_differences",
    "same_but_for_numbers",
    "same_but_for_sizes",
]
