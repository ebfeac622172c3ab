"""From the order of a plan to Python code that runs one step of a recorded module.

Gets a simplified graph and the steps of a plan; gives a forward function and a backward generator.
Read graph/: views.py and overwrite.py (rewriting the graph), node_storages.py (the storages of a
node). Then program/: statements.py (the parts of a program),
places.py (hand-overs of gradients), moves.py (storages that leave the device), state.py (state for
recomputations), lowering.py (the order and the drops), source.py (code generation). Then
reads.py (values that a forward has read), stand_ins.py and bindings.py (the functions that are
called).
"""

from rkgb.run.graph.views import RunnableGraph
from rkgb.run.program.lowering import moves_without_idle_steps, without_idle_steps
from rkgb.run.program.moves import RootMove, movable_roots
from rkgb.run.program.places import Places, held_bytes, single_places, waiting_places
from rkgb.run.program.source import CompiledStep
from rkgb.run.program.state import rerun_state, runs_once
from rkgb.run.program.statements import (
    Begin,
    Call,
    Drop,
    Give,
    MoveOut,
    Moving,
    Statement,
    StepProgram,
    Sum,
    TakeArena,
    made_by,
    read_by,
)
from rkgb.run.reads import Outcomes

__all__ = [
    "Begin",
    "Call",
    "CompiledStep",
    "Drop",
    "Give",
    "MoveOut",
    "Moving",
    "Outcomes",
    "Places",
    "RootMove",
    "RunnableGraph",
    "Statement",
    "StepProgram",
    "Sum",
    "TakeArena",
    "held_bytes",
    "made_by",
    "movable_roots",
    "moves_without_idle_steps",
    "read_by",
    "rerun_state",
    "runs_once",
    "single_places",
    "waiting_places",
    "without_idle_steps",
]
