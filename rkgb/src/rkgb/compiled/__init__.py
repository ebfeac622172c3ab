"""Runs of neighbouring nodes as one node each, whose forward and backward inductor has compiled.

A recorded graph has in every node a list of operations for the forward and one for the backward.
That is all that measuring, planning, lowering and running look at. So a piece is compiled into a
node of the same form: one operation `compiled ... forward`, one operation `compiled ... backward`,
and what the first makes for the second is a value like any other.

    S graph ──grouping──► runs of nodes ──D_to_S again──► one node a run, its part of the backward
      │                                                        │
      │   joint: the recorded operations of forward and backward, as a function of what comes in
      │                                                        │
      │   compiling: equal joints once ─ traced, functional ─ min-cut ─ forward ─ run on stand-ins:
      │            strides and storages as they are ─ backward for these ─ run: the same
      │   known: the first size of a form has code of its own, the second makes code for all sizes
      │                                                        │
      └──── rewrite: the operations of each run replaced, facts about values to match ──► S graph

The backward is not derived again: the recording has it, casts of autocast and sums of gradients
included. Nothing is compiled whose bits could depend on more than its inputs: random numbers are
drawn between pieces, by eager's own operations, and what adds in an order that varies (scatters,
embeddings) stays eager. A piece computes norms and what works element by element again in its
backward, or keeps them: a choice of the plan, where both have the same bits. So a value has the
same bits under every budget. Statistics of BatchNorm are updated behind a piece, by an operation
that a recomputation leaves out.

What a piece returns is checked against the recording before it is used: shape, type, strides, and
which values share memory. What does not compile, or does not fit, stays as it was recorded, and is
named with the reason. Read `pieces/` (`grouping`, `layouts`, `joint`, `formulas`), then `code/`
(`halves`, `compiling`, `classes`, `sizes`, `known`, `keeping`), `rewrite`, `replacing`.
"""

from rkgb.compiled.code.classes import NotCompiledError
from rkgb.compiled.rewrite import CompiledGraph, compile_pieces, compile_variant

__all__ = ["CompiledGraph", "NotCompiledError", "compile_pieces", "compile_variant"]
