"""rkgb: graphs of PyTorch modules, from the captured forward to forward-backward with costs."""

from rkgb import anonymize as Atools
from rkgb import backward as Ktools
from rkgb import dataflow as Dtools
from rkgb import simplified as Stools
from rkgb.api import (
    RkgbResult,
    make_all_graphs,
    test_rkgb,
)
from rkgb.backward import KGraph
from rkgb.basic import BasicGraph
from rkgb.capture import record as Btools
from rkgb.costs.recorded_costs import RecordedCosts
from rkgb.dataflow import DataFlowGraph
from rkgb.errors import (
    DataDependentError,
    InvalidGraphError,
    RkgbError,
    SideEffectError,
    TraceError,
    UnsupportedOpError,
)
from rkgb.render import print_all_graphs, print_graph, print_graph_list
from rkgb.simplified import SimplifiedGraph

__version__ = "0.1.0"

# The spelling of the published examples is kept beside the files' own names.
atools, btools, dtools, ktools, stools = Atools, Btools, Dtools, Ktools, Stools

__all__ = [
    "Atools",
    "BasicGraph",
    "Btools",
    "DataDependentError",
    "DataFlowGraph",
    "Dtools",
    "InvalidGraphError",
    "KGraph",
    "Ktools",
    "RecordedCosts",
    "RkgbError",
    "RkgbResult",
    "SideEffectError",
    "SimplifiedGraph",
    "Stools",
    "TraceError",
    "UnsupportedOpError",
    "make_all_graphs",
    "print_all_graphs",
    "print_graph",
    "print_graph_list",
    "test_rkgb",
]
