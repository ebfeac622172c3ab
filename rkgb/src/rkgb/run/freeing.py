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
from rkgb.graphs.uses import At, roots_of
from rkgb.opaque.piece import RunPieceBackward
from rkgb.run.node_storages import dying_in_backward, storages_of

FREEING = (CompiledCall, RunPieceBackward)  # they say of arguments that they free them


def freeing(sg: SimplifiedGraph) -> SimplifiedGraph:
    """Return a graph as it is run, whose backwards of several kernels free what is theirs."""
    if not any(isinstance(op.target, FREEING) for node in sg.nodes for op in node.backward):
        return sg
    infos, home, last = sg.dataflow.infos, sg.producer, sg.uses_behind.last
    outside = set(sg.dataflow.basic.externals)
    dying = dying_in_backward(storages_of(sg))
    tangents = filter(None, sg.dataflow.basic.tangent_names)
    held = {
        name for name in tangents if not infos[name].shape
    }  # of losses: by autograd, to the end

    def frees(op: Op, at: At) -> Op:
        if not isinstance(op.target, FREEING):
            return op
        made = roots_of(infos, op.results)
        places = []
        for place, name in enumerate(op.inputs):
            root = infos[name].alias_of
            is_gradient = root not in home and root not in outside
            ends = last[root] == at and root not in made and root not in held
            if ends and (is_gradient or root in dying[at.part]):
                places.append(place)
        return replace(op, target=op.target.freeing(frozenset(places)))

    nodes = tuple(
        replace(
            node, backward=tuple(frees(op, At(index, at)) for at, op in enumerate(node.backward))
        )
        for index, node in enumerate(sg.nodes)
    )
    return replace(sg, nodes=nodes)
