"""rkgb: graphs of PyTorch modules, from the captured forward to forward-backward with costs."""

from rkgb.api import RkgbResult, make_all_graphs
from rkgb.atlas.forward_backward import KGraph
from rkgb.costs.op_costs import FlopCost
from rkgb.costs.recorded_costs import RecordedCosts
from rkgb.errors import (
    CompilerMissingError,
    CopyError,
    DataDependentError,
    InvalidGraphError,
    OpaquePieceError,
    OtherWayError,
    RkgbError,
    SideEffectError,
    TraceError,
    UnsupportedDeviceError,
    UnsupportedOpError,
)
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.pictures.render import print_all_graphs, print_graph, print_graph_list
from rkgb.published import Atools, Btools, Dtools, Ktools, Stools
from rkgb.published.check import test_rkgb

__version__ = "3.0.0"

# The spelling of the published examples is kept beside the files' own names.
atools, btools, dtools, ktools, stools = Atools, Btools, Dtools, Ktools, Stools

__all__ = [
    "Atools",
    "BasicGraph",
    "Btools",
    "CompilerMissingError",
    "CopyError",
    "DataDependentError",
    "DataFlowGraph",
    "Dtools",
    "FlopCost",
    "InvalidGraphError",
    "KGraph",
    "Ktools",
    "OpaquePieceError",
    "OtherWayError",
    "RecordedCosts",
    "RkgbError",
    "RkgbResult",
    "SideEffectError",
    "SimplifiedGraph",
    "Stools",
    "TraceError",
    "UnsupportedDeviceError",
    "UnsupportedOpError",
    "make_all_graphs",
    "print_all_graphs",
    "print_graph",
    "print_graph_list",
    "test_rkgb",
]
