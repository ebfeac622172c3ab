"""Parts of a step that run piece by piece, along rows that do not depend on each other.

A linear layer, a norm, a softmax over features, an activation, the loss of each token: each row of
what they make depends on one row of what they read. A run of such operations needs, cut in k pieces
of rows, a k-th of the memory inside. Its forward is one operation that makes its results piece by
piece and leaves nothing else; its backward is one that, for each piece, runs the forward of that
piece again and then its backward. Gradients of weights, and losses, are sums over pieces.

    S graph ──regions: runs around the widest values──► one node each ──┐
                                                                        │ recorded operations
    rules: on which pieces an operation runs, and what comes of it ──►  pieces: before, loop, after
                                                                        │
    S graph ◄──rewrite: one call for the forward, one for the backward──┘

Placements are found as distributed tensors find theirs, over time instead of over devices: a value
is cut along rows, whole, or a sum over pieces. Every rule says what is right for any numbers, and
how to cut first is only tried: what has no rule stays whole. Read cuts.py (how a tensor is cut),
rules.py (each kind of operation), pieces.py (many of them), call.py (how they run), regions.py
(what is worth cutting), rewrite.py (into a graph).
"""

from rkgb.rows.call import InPieces
from rkgb.rows.pieces import NotByPiecesError
from rkgb.rows.rewrite import CutGraph, CutNode, cut_in_rows

__all__ = ["CutGraph", "CutNode", "InPieces", "NotByPiecesError", "cut_in_rows"]
