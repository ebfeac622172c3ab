"""Submodules that cannot be recorded: each is one operation that runs the user's Python.

Gets a submodule and the arguments of one call; gives a forward operation and a backward operation
for the recording, and runs them in a step. Read call.py (a call, and how it is run), piece.py (its
operations), then inner_graph.py (what autograd keeps between the two), left_behind.py (what it
leaves), trial.py (what a call costs) and adding.py (its gradients).
"""

from rkgb.opaque.piece import RunPiece, running_on

__all__ = ["RunPiece", "running_on"]
