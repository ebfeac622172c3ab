"""Let a call free what only it still reads, as soon as it has read it.

Gradients that nothing reads afterwards, and what the forward has kept for this backward alone, are
dropped by the program when the backward of a node begins, in every plan. Compiled code and opaque
pieces take a list that they empty, and so free each of them after its last use inside.
"""

from __future__ import annotations

from dataclasses import replace

from rkgb.elements.compiled_call import CompiledCall
from rkgb.elements.op import Op
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.opaque.piece import RunPieceBackward
from rkgb.run.node_storages import dying_in_backward, storages_of

FREEING = (CompiledCall, RunPieceBackward)  # they say of arguments that they free them


def freeing(sg: SimplifiedGraph) -> SimplifiedGraph:
    """Return a graph as it is run, whose backwards of several kernels free what is theirs."""
    if not any(isinstance(op.target, FREEING) for node in sg.nodes for op in node.backward):
        return sg
    infos, home = sg.dataflow.infos, sg.producer
    outside = set(sg.dataflow.basic.externals)
    dying = dying_in_backward(storages_of(sg))
    last: dict[str, tuple[int, int]] = {}  # storage -> node and place of who reads it last
    handed: set[tuple[int, str]] = set()
    for index in reversed(range(len(sg.nodes))):
        node = sg.nodes[index]
        for place, op in enumerate(node.backward):
            for name in (*op.inputs, *filter(None, op.results)):
                last[infos[name].alias_of] = (index, place)
        for hand_over in node.hand_overs:
            root = infos[hand_over.value].alias_of
            handed.add((index, root))
            last[root] = (index, len(node.backward))
    for name in filter(None, sg.dataflow.basic.tangent_names):
        if not infos[name].shape:  # autograd holds the gradient of a loss to the end
            last.pop(name, None)

    def frees(op: Op, index: int, place: int) -> Op:
        if not isinstance(op.target, FREEING):
            return op
        made = {infos[name].alias_of for name in op.results if name}
        places = []
        for at, name in enumerate(op.inputs):
            root = infos[name].alias_of
            is_gradient = root not in home and root not in outside
            ends = last.get(root) == (index, place) and root not in made
            if ends and (is_gradient or root in dying[index]):
                places.append(at)
        return replace(op, target=op.target.freeing(frozenset(places)))

    nodes = tuple(
        replace(
            node, backward=tuple(frees(op, index, place) for place, op in enumerate(node.backward))
        )
        for index, node in enumerate(sg.nodes)
    )
    return replace(sg, nodes=nodes)
