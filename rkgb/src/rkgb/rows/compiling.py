"""Pieces of rows as compiled code: what their loop does between products, in a call each.

Products stay operations of torch's own. They write into memory that they are given, and add up the
gradient of a weight where it is. A loss with its gradient of logits, between two products, becomes
one pass over the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rkgb.elements.op import Op, run_op
from rkgb.elements.target import Target
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.rows.call import InPieces
from rkgb.rows.cuts import piece_of
from rkgb.rows.pieces import Pieces


def compiled_loops(sg: SimplifiedGraph, node: SimplifiedNode) -> SimplifiedNode:
    """Return a node in pieces of rows with compiled loops; the same if nothing compiles."""
    found: dict[Op, Op] = {}
    for op in (*node.ops, *node.backward):
        if isinstance(op.target, InPieces):
            pieces = _compiled(op.target.pieces, sg.infos, sg.basic.device)
            if pieces is not op.target.pieces:
                target = InPieces(pieces, op.target.name, op.target.side)
                found[op] = replace(op, target=target)
    if not found:
        return node
    ops, backward = (tuple(found.get(op, op) for op in part) for part in (node.ops, node.backward))
    return replace(node, ops=ops, backward=backward)


def _compiled(pieces: Pieces, infos: Mapping[str, TensorInfo], device: torch.device) -> Pieces:
    from rkgb.compiled import compile_series

    kept = {*pieces.gathered, *pieces.summed}
    values = {name: infos[name].empty("meta") for name in pieces.takes}
    with torch.no_grad():
        for op in pieces.before:
            run_op(op, values, None)

    def compiled(ops: Sequence[Op], index: int) -> tuple[Op, ...]:
        given: dict[str, Tensor] = dict(values)
        for name, part in pieces.slices.items():
            given[name] = piece_of(values[part.source], part.cuts, index, pieces.runs)
        return compile_series(ops, given, kept, device)

    loop = compiled(pieces.loop, 0)
    short = compiled(pieces.short, pieces.runs.parts - 1)
    by_calls = {
        name for op in (*loop, *short) if isinstance(op.target, Target) for name in op.results
    }
    if not by_calls:
        return pieces
    into = {name: over for name, over in pieces.into.items() if name not in by_calls}
    return replace(pieces, loop=loop, short=short, into=into)
