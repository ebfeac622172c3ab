"""The storages that the nodes of a graph make, with their readers: what a plan keeps or drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.graphs.uses import roots_of


@dataclass(frozen=True, slots=True)
class NodeStorage:
    """One storage that a node makes and that is read outside its forward.

    Only the node's own backward reads a phantom (statistics, masks, indices).
    """

    root: str  # the value that made it
    size_bytes: int
    producer: int
    fwd_users: tuple[int, ...]
    bwd_users: tuple[int, ...]
    is_output: bool

    @property
    def is_phantom(self) -> bool:
        return not self.fwd_users and not self.is_output and self.bwd_users == (self.producer,)


def dying_in_backward(storages: Sequence[Sequence[NodeStorage]]) -> list[frozenset[str]]:
    """Return for each node the storages that nothing reads after its backward, under any plan.

    After it only earlier nodes run. So a storage that none of them reads can be freed within the
    backward, after the last read there.
    """
    dying: list[set[str]] = [set() for _ in storages]
    for storage in (s for made in storages for s in made):
        users = (*storage.fwd_users, *storage.bwd_users)
        if not storage.is_output and storage.bwd_users and min(users) in storage.bwd_users:
            dying[min(users)].add(storage.root)
    return [frozenset(roots) for roots in dying]


def storages_of(sg: SimplifiedGraph) -> tuple[tuple[NodeStorage, ...], ...]:
    """Return for each node the storages that it makes and that are read from outside.

    Memory of parameters, buffers, constants and inputs is left out.
    """
    infos, uses, behind = sg.infos, sg.uses, sg.uses_behind
    outputs, end = sg.output_roots, len(sg.nodes) - 1
    leaving = roots_of(infos, sg.output_names) - outputs  # alive until the forward returns
    found = []
    for index, node in enumerate(sg.nodes):
        made = []
        for root in dict.fromkeys(infos[n].alias_of for op in node.ops for n in op.results if n):
            if uses.maker.get(root) != index:
                continue
            fwd_users = {*uses.parts_reading(root), *([end] if root in leaving else [])} - {index}
            bwd_users = behind.parts_reading(root)
            if fwd_users or bwd_users or root in outputs or root in leaving:
                users = tuple(sorted(fwd_users)), tuple(sorted(bwd_users))
                size = infos[root].counted_bytes
                made.append(NodeStorage(root, size, index, *users, root in outputs))
        found.append(tuple(made))
    return tuple(found)
