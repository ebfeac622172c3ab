"""Saves and restores the state of a module and of Python that a call may change.

Gets a module before a call; restores attributes, buffers, parameters and random states. Read
start_of_call.py (state at the start of a call), then kept_writes.py (parameters, saved before their
first write, and arguments) and history.py (what earlier steps have left).
"""

from rkgb.module_state.history import without_history
from rkgb.module_state.kept_writes import KeptTensors, KeptWrites, ParameterPlaces
from rkgb.module_state.start_of_call import (
    BufferContents,
    FirstRun,
    Lent,
    ModuleState,
    PythonRandom,
    StartOfCall,
    finding_what_changes,
)

__all__ = [
    "BufferContents",
    "FirstRun",
    "KeptTensors",
    "KeptWrites",
    "Lent",
    "ModuleState",
    "ParameterPlaces",
    "PythonRandom",
    "StartOfCall",
    "finding_what_changes",
    "without_history",
]
