"""What a call may change of a module and of Python, kept so that it can be put back.

Gets a module before a call; puts attributes, buffers, parameters and random numbers back. Read
start_of_call.py (what a call finds), then kept_writes.py (parameters, kept before a first write).
"""

from rkgb.module_state.kept_writes import KeptWrites
from rkgb.module_state.start_of_call import (
    BufferContents,
    Lent,
    ModuleState,
    PythonRandom,
    StartOfCall,
)

__all__ = [
    "BufferContents",
    "KeptWrites",
    "Lent",
    "ModuleState",
    "PythonRandom",
    "StartOfCall",
]
