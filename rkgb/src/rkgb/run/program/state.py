"""The state that a recomputation needs: memory to which the forward writes.

Buffers outlive the step, and so do values in their memory: views of them, and results of operations
that write into them. Another forward may write there before the backward runs. So a recomputation
reads copies, which are made when the node runs first. The backward itself reads what autograd has
saved; the runtime guards its versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rkgb.elements.op import BATCH_NORMS, Op
from rkgb.elements.target import target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.graphs.uses import live_ops, roots_of

_NO_NAMES: Mapping[str, str] = {}


def copied_for_rerun(sg: SimplifiedGraph, node: SimplifiedNode) -> Mapping[str, str]:
    """Return the values that a recomputation of `node` reads from copies, and the copied values.

    Names with the same place in memory share a copy.
    """
    if not sg.written_roots:
        return _NO_NAMES
    infos = sg.infos
    made = {name for op in node.ops for name in op.results}
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for op in rerun_ops(sg, node):
        for name in op.inputs:
            if name not in made and infos[name].alias_of in sg.written_roots:
                found[name] = first.setdefault(_place(infos[name]), name)
    return found


def rerun_state(sg: SimplifiedGraph, node: SimplifiedNode) -> tuple[str, ...]:
    """Return the values that are copied before the first run of `node`, for recomputations."""
    return tuple(dict.fromkeys(copied_for_rerun(sg, node).values()))


def runs_once(sg: SimplifiedGraph, node: SimplifiedNode) -> bool:
    """Return whether copies could not replace the inputs of `node` in a recomputation.

    This is so if it writes to memory of which it reads several values, or reads a part that is not
    dense.
    """
    copied = [sg.infos[name] for name in rerun_state(sg, node)]
    if not copied:
        return False
    changed = roots_of(sg.infos, (n for op in rerun_ops(sg, node) for n in op.writes))
    many = Counter(info.alias_of for info in copied)
    return any(not i.is_dense or (i.alias_of in changed and many[i.alias_of] > 1) for i in copied)


def rerun_ops(sg: SimplifiedGraph, node: SimplifiedNode) -> tuple[Op, ...]:
    """Return the operations of a recomputation of `node`, without updates that nothing reads."""
    if any(target_of(op).runs_python for op in node.ops):
        node = replace(node, ops=tuple(target_of(op).again(op) for op in node.ops))
    if not node.written_buffers:
        return node.ops
    infos, written = sg.infos, set(node.written_buffers)
    read = [name for name in node.outputs if infos[name].alias_of not in written]

    def only_updates(op: Op) -> bool:
        return bool(op.writes) and roots_of(infos, op.writes) <= written

    def bare(op: Op) -> Op:
        if op.target_name not in BATCH_NORMS or not only_updates(op):
            return op
        # In training mode nothing else depends on the running statistics.
        return replace(op, args=(*op.args[:3], None, None, *op.args[5:]), writes=())

    ops = tuple(map(bare, node.ops))
    return tuple(ops[i] for i in live_ops(infos, ops, read, lambda op: not only_updates(op)))


def _place(info: TensorInfo) -> object:
    return info.alias_of, info.dtype, info.shape, info.stride, info.offset
