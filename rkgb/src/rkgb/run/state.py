"""What a recomputation must find as the first run found it: memory that the forward writes to.

Buffers outlive the step, and so does what lies in their memory: views of them, and what operations
return that write into them. Another forward may have written there before a backward comes. So a
recomputation reads copies, made when the node ran first. Whatever a plan runs again, what the
backward itself reads there is what autograd has saved, and whoever runs it looks at versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rkgb.elements.op import BATCH_NORMS, Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.opaque.piece import RunPiece, piece_again

_NO_NAMES: Mapping[str, str] = {}


def copied_for_rerun(sg: SimplifiedGraph, node: SimplifiedNode) -> Mapping[str, str]:
    """Return what a recomputation of `node` reads from a copy, and the value that is copied.

    Names of one place in memory share a copy.
    """
    if not sg.written_roots:
        return _NO_NAMES
    infos = sg.dataflow.infos
    made = {name for op in node.ops for name in op.results}
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for op in rerun_ops(sg, node):
        for name in op.inputs:
            if name not in made and infos[name].alias_of in sg.written_roots:
                found[name] = first.setdefault(_place(infos[name]), name)
    return found


def rerun_state(sg: SimplifiedGraph, node: SimplifiedNode) -> tuple[str, ...]:
    """Return the values that a recomputation of `node` needs as they were before its first run."""
    return tuple(dict.fromkeys(copied_for_rerun(sg, node).values()))


def runs_once(sg: SimplifiedGraph, node: SimplifiedNode) -> bool:
    """Whether copies of what `node` needs as it was would not be what it has run on.

    It writes to memory of which it reads several values, or reads a part that does not lie densely.
    """
    copied = [sg.dataflow.infos[name] for name in rerun_state(sg, node)]
    if not copied:
        return False
    changed = _roots(sg.dataflow.infos, (n for op in rerun_ops(sg, node) for n in op.writes))
    many = Counter(info.alias_of for info in copied)
    return any(not i.is_dense or (i.alias_of in changed and many[i.alias_of] > 1) for i in copied)


def rerun_ops(sg: SimplifiedGraph, node: SimplifiedNode) -> tuple[Op, ...]:
    """Return what a recomputation of `node` runs: without updates that nothing in it reads."""
    if any(isinstance(op.target, RunPiece) for op in node.ops):
        node = replace(node, ops=tuple(map(piece_again, node.ops)))
    if not node.written_buffers:
        return node.ops
    infos, written = sg.dataflow.infos, set(node.written_buffers)
    read = {name for name in node.outputs if infos[name].alias_of not in written}
    roots: set[str] = set()  # of what is read later
    kept: list[Op] = []
    for op in reversed(node.ops):
        updates = bool(op.writes) and all(infos[n].alias_of in written for n in op.writes)
        if updates and op.target_name in BATCH_NORMS:
            # Only evaluation reads the statistics: without them no other result changes.
            op = replace(op, args=(*op.args[:3], None, None, *op.args[5:]), writes=())
            updates = False
        if updates and read.isdisjoint(op.results) and roots.isdisjoint(_roots(infos, op.writes)):
            continue
        kept.append(op)
        read.update(op.inputs)
        roots.update(_roots(infos, op.inputs))
    return tuple(reversed(kept))


def _roots(infos: Mapping[str, TensorInfo], names: Iterable[str]) -> set[str]:
    return {infos[name].alias_of for name in names}


def _place(info: TensorInfo) -> object:
    return info.alias_of, info.dtype, info.shape, info.stride, info.offset
