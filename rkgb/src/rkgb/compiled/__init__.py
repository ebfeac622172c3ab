"""Pieces: runs of neighbouring nodes, merged into one node each and compiled by inductor.

Each node of a recorded graph has a list of operations for the forward and one for the backward.
Measuring, planning, lowering and running look at nothing else. So a piece is compiled into a node
of the same form, with one operation `compiled ... forward` and one `compiled ... backward`. The
saved tensors between them are ordinary values of the graph.

    S graph ──grouping──► runs of nodes ──D_to_S again──► one node a run, its part of the backward
      │                                                        │
      │   joint: the recorded operations of forward and backward, as a function of the inputs
      │                                                        │
      │   compiling: equal joints once ─ traced, functional ─ min-cut ─ forward ─ run on stand-ins:
      │            strides and storages as they are ─ backward for these ─ run: the same
      │   known: the first size of a form has code of its own, the second makes code for all sizes
      │                                                        │
      └──── rewrite: the operations of each run replaced, facts about values to match ──► S graph

The backward is the recorded one, with casts of autocast and sums of gradients. An operation whose
bits could depend on more than its inputs is not compiled. Random numbers are drawn between pieces
by eager operations, and nondeterministic sums (scatters, embeddings) stay eager. A piece saves
norms and elementwise results or recomputes them in its backward. The plan chooses, and only if both
have the same bits. So a value has the same bits under every budget. An operation after the piece
updates statistics of BatchNorm; recomputations leave it out.

Results of a piece are checked against the recording: shape, type, strides, and which values share
memory. A run that does not compile, or does not match, stays eager and is reported with the reason.
Read `pieces/` (`grouping`, `layouts`, `joint`, `formulas`), then `code/` (`halves`, `compiling`,
`classes`, `sizes`, `known`), `rewrite`, `replacing`, and `series` (code without a backward).
"""

from rkgb.compiled.rewrite import Apart, CompiledGraph, compile_pieces
from rkgb.compiled.series import compile_series, products_first

__all__ = ["Apart", "CompiledGraph", "compile_pieces", "compile_series", "products_first"]
