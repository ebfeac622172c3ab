"""Parts of a step that run piece by piece, along rows that do not depend on each other.

In a linear layer, a norm, a softmax over features, an activation and the loss of each token, each
row of the results depends on one row of the inputs. If a run of such operations is cut into k
pieces of rows, its inner values take a k-th of their memory. Its forward becomes one operation,
which makes the results piece by piece and keeps nothing else. Its backward becomes one operation,
which recomputes the forward of each piece and then runs its backward. Gradients of weights, and
losses, are sums over pieces. Where the backward begins with the gradient of a loss, the forward
makes the gradients of its pieces too, and nothing runs twice (losses.py).

    S graph ──rewrite: runs around the widest values──► one node each ──┐
                                                                        │ recorded operations
    rules: which pieces an operation reads, and how it is cut ──────►  pieces: before, loop, after
                                                                        │
    S graph ◄──rewrite: one call for the forward, one for the backward──┘

Placements are propagated as for distributed tensors, over time instead of over devices: a value is
cut along rows, whole, or a sum over pieces. Each rule is correct for all values. The first cut is
found by trial, and operations without a rule stay whole. An elementwise write into what the run
has made (`relu_`) becomes a new piece, if nothing reads the old one again. Read cuts.py (how a
tensor is cut), rules.py (each kind of operation), pieces.py (a run of operations), channels.py
(convolutions in parts), memory.py (where results lie), call.py (how they run), node.py (one node in
pieces), rewrite.py (which runs are worth cutting, and into a graph), same_bits.py (pieces that have
the bits of the whole) and compiling.py (pieces as compiled code).
"""

from rkgb.rows.rewrite import Cut, CutGraph, CutNode, cut_in_rows
from rkgb.rows.same_bits import BitsOfPieces

__all__ = ["BitsOfPieces", "Cut", "CutGraph", "CutNode", "cut_in_rows"]
