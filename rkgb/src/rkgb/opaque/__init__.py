"""Opaque calls: submodules that cannot be recorded; each call is one operation that runs Python.

Gets a submodule and the arguments of one call; gives a forward operation and a backward operation
for the recording, and runs them in a step. Read call.py (a call, and how it is run), piece.py (its
operations), then inner_graph.py (autograd's graph between the two), left_behind.py (side effects),
trial.py (the costs of a call) and adding.py (its gradients).
"""

from rkgb.opaque.piece import RunPiece, running_on

__all__ = ["RunPiece", "running_on"]
