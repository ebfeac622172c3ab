"""Donation: a call frees arguments that nobody else reads, after their last use inside.

When the backward of a node begins, the program drops gradients and saved tensors that nothing reads
later, under every plan. Compiled code and opaque calls take them in a list that they empty, and
free each one after its last use inside.
"""

from __future__ import annotations

from dataclasses import replace

from rkgb.elements.op import Op
from rkgb.elements.target import target_of
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.graphs.uses import At, roots_of
from rkgb.run.graph.node_storages import dying_in_backward, storages_of
from rkgb.run.graph.overwrite import made_by_backward


def freeing(sg: SimplifiedGraph) -> SimplifiedGraph:
    """Return the graph in which backwards of several kernels take donated arguments."""
    if not any(target_of(op).run for node in sg.nodes for op in node.backward):
        return sg
    infos, home, last = sg.infos, sg.producer, sg.uses_behind.last
    outside = set(sg.basic.externals)
    dying = dying_in_backward(storages_of(sg))
    tangents = filter(None, sg.basic.tangent_names)
    # Autograd holds those of losses to the end.
    held = {name for name in tangents if not infos[name].shape}
    made_behind = made_by_backward(sg.nodes, infos)

    def frees(op: Op, at: At) -> Op:
        target = target_of(op)
        if target.run is None:
            return op
        made = roots_of(infos, op.results)
        given = [infos[name].alias_of for name in op.inputs]
        places, own = [], []
        for place, name in enumerate(op.inputs):
            root = infos[name].alias_of
            is_gradient = root not in home and root not in outside
            ends = last[root] == at and root not in made and root not in held
            if ends and (is_gradient or root in dying[at.part]):
                places.append(place)
                if root in made_behind and given.count(root) == 1:
                    own.append(place)
        return replace(op, target=target.freeing(frozenset(places), frozenset(own)))

    nodes = tuple(
        replace(
            node, backward=tuple(frees(op, At(index, at)) for at, op in enumerate(node.backward))
        )
        for index, node in enumerate(sg.nodes)
    )
    return replace(sg, nodes=nodes)
