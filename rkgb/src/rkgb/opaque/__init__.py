"""Opaque calls: submodules that cannot be recorded; each call is one operation that runs Python.

Gets a submodule and the arguments of one call; gives a forward operation and a backward operation
for the recording, and runs them in a step. Read call.py (a call, and how it is run), piece.py (its
operations), then inner_graph.py (autograd's graph between the two), gradients.py (its gradients),
left_behind.py (side effects), trial.py (the costs of a call), link.py (a recorded call under
autograd), recording.py (opaque calls in a recording) and functions.py (autograd Functions of the
user's).

The package works without this folder: then a module that cannot be recorded is refused.
"""

from rkgb.opaque.functions import function_of, run_functions_whole
from rkgb.opaque.recording import PieceRecorder

__all__ = ["PieceRecorder", "function_of", "run_functions_whole"]
