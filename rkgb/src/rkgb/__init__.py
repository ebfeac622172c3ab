"""rkgb: graphs of PyTorch modules, from the captured forward to forward-backward with costs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from rkgb.api import RkgbResult, make_all_graphs
    from rkgb.atlas.forward_backward import KGraph
    from rkgb.pictures.render import print_all_graphs, print_graph, print_graph_list
    from rkgb.published import Atools, Btools, Dtools, Ktools, Stools
    from rkgb.published.check import test_rkgb

__version__ = "3.0.0"

# Pictures and the published pipeline are imported when they are used: planning needs neither.
_HOMES = {
    "RkgbResult": "api",
    "make_all_graphs": "api",
    "KGraph": "atlas.forward_backward",
    "print_all_graphs": "pictures.render",
    "print_graph": "pictures.render",
    "print_graph_list": "pictures.render",
    "test_rkgb": "published.check",
}
_TOOLS = ("Atools", "Btools", "Dtools", "Ktools", "Stools")  # modules


def __getattr__(name: str) -> Any:
    tool = name.capitalize()  # the spelling of the published examples is kept, too
    if tool in _TOOLS:
        return importlib.import_module(f"rkgb.published.{tool}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rkgb.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


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
