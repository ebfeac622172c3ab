"""Submodules that cannot be recorded: each is one operation that runs the user's Python.

Gets a submodule and the arguments of one call; gives a forward operation and a backward operation
for the recording, and runs them in a step. Read call.py (a call, and how it is run), piece.py (its
operations), then inner_graph.py (what autograd keeps between the two), module_state.py (what Python
changes), kept_writes.py (parameters that it changes), left_behind.py (what it leaves), trial.py
(what a call costs) and adding.py (its gradients).
"""

from rkgb.opaque.call import is_inside
from rkgb.opaque.inner_graph import CAST
from rkgb.opaque.kept_writes import KeptWrites
from rkgb.opaque.module_state import (
    BufferContents,
    Lent,
    ModuleState,
    PythonRandom,
    StartOfCall,
)
from rkgb.opaque.piece import RunPiece, running_on

__all__ = [
    "CAST",
    "BufferContents",
    "KeptWrites",
    "Lent",
    "ModuleState",
    "PythonRandom",
    "RunPiece",
    "StartOfCall",
    "is_inside",
    "running_on",
]
