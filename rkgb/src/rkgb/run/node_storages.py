"""The storages that the nodes of a graph make, and who reads them: what a plan keeps or drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rkgb.graphs.simplified import SimplifiedGraph


@dataclass(frozen=True, slots=True)
class NodeStorage:
    """One storage that a node makes and somebody outside its forward reads.

    A phantom is read by nobody but the node's own backward: statistics, masks, indices.
    """

    root: str  # the value that made it
    names: tuple[str, ...]  # values in it that are read from outside
    size_bytes: int
    producer: int
    fwd_users: tuple[int, ...]
    bwd_users: tuple[int, ...]
    is_output: bool

    @property
    def is_phantom(self) -> bool:
        return not self.fwd_users and not self.is_output and self.bwd_users == (self.producer,)


def dying_in_backward(storages: Sequence[Sequence[NodeStorage]]) -> list[frozenset[str]]:
    """Return, for each node, the storages that nothing reads after its backward, in any plan.

    Afterwards only earlier nodes run. So a storage that none of them reads can go within the
    backward, as soon as the last operation there has read it.
    """
    dying: list[set[str]] = [set() for _ in storages]
    for storage in (s for made in storages for s in made):
        users = (*storage.fwd_users, *storage.bwd_users)
        if not storage.is_output and storage.bwd_users and min(users) in storage.bwd_users:
            dying[min(users)].add(storage.root)
    return [frozenset(roots) for roots in dying]


def storages_of(sg: SimplifiedGraph) -> tuple[tuple[NodeStorage, ...], ...]:
    """Return, for each node, the storages that it makes and that are read from outside.

    What lies in parameters, buffers, constants or inputs is nobody's, and left out.
    """
    infos, home = sg.dataflow.infos, sg.producer
    fwd: dict[str, set[int]] = {}
    bwd: dict[str, set[int]] = {}
    names: dict[str, dict[str, None]] = {}
    for index, node in enumerate(sg.nodes):
        for name in node.inputs:
            fwd.setdefault(infos[name].alias_of, set()).add(index)
            names.setdefault(infos[name].alias_of, {})[name] = None
        for name in node.read_by_backward:
            if name in home:
                bwd.setdefault(infos[name].alias_of, set()).add(index)
                names.setdefault(infos[name].alias_of, {})[name] = None
    _follow_views(sg, bwd)
    outputs, end = sg.output_roots, len(sg.nodes) - 1
    for name in sg.output_names:
        root = infos[name].alias_of
        if root not in outputs:  # it is there until the forward returns
            fwd.setdefault(root, set()).add(end)
        names.setdefault(infos[name].alias_of, {})[name] = None
    found = []
    for index, node in enumerate(sg.nodes):
        made = []
        for root in dict.fromkeys(infos[n].alias_of for op in node.ops for n in op.results if n):
            if root not in names or home.get(root) != index:
                continue
            made.append(
                NodeStorage(
                    root=root,
                    names=tuple(names[root]),
                    size_bytes=infos[root].storage_bytes,
                    producer=index,
                    fwd_users=tuple(sorted(fwd.get(root, set()) - {index})),
                    bwd_users=tuple(sorted(bwd.get(root, ()))),
                    is_output=root in outputs,
                )
            )
        found.append(tuple(made))
    return tuple(found)


def _follow_views(sg: SimplifiedGraph, bwd: dict[str, set[int]]) -> None:
    """Count readers of what the backward itself makes in a forward's storage: views, writes."""
    infos, home = sg.dataflow.infos, sg.producer
    for index, node in enumerate(sg.nodes):
        for name in node.read_by_backward:
            root = infos[name].alias_of
            if name not in home and root in home:
                bwd.setdefault(root, set()).add(index)
