"""The passes that make a simplified graph: which operations are dropped, which belong together.

Each works on groups of operations, can be applied alone and keeps the results; see `D_to_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rkgb.dataflow import DataFlowGraph, DataFlowNode
from rkgb.op import Ref, map_refs


@dataclass
class Groups:
    """The passes' working state: operations, which are dropped, and which belong together."""

    dataflow: DataFlowGraph
    nodes: list[DataFlowNode]
    outputs: list[Any]
    dropped: set[int]
    parent: list[int]

    @classmethod
    def singletons(cls, dg: DataFlowGraph) -> Groups:
        count = len(dg.nodes)
        return cls(dg, list(dg.nodes), list(dg.basic.outputs), set(), list(range(count)))

    def find(self, index: int) -> int:
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def merge(self, first: int, second: int) -> None:
        a, b = sorted((self.find(first), self.find(second)))
        self.parent[b] = a

    def alive(self) -> Iterable[int]:
        return (index for index in range(len(self.nodes)) if index not in self.dropped)

    def users(self) -> dict[str, list[int]]:
        table: dict[str, list[int]] = {}
        for index in self.alive():
            for name in dict.fromkeys(self.nodes[index].op.inputs):
                table.setdefault(name, []).append(index)
        return table

    @property
    def buffers(self) -> Mapping[str, str]:
        return self.dataflow.basic.buffers

    def root(self, name: str) -> str | None:
        info = self.dataflow.infos.get(name)
        return info.alias_of if info is not None else None


Pass = Callable[[Groups], None]


def drop_identities(groups: Groups) -> None:
    """Drop operations that returned their input itself; rename what an in-place result replaced.

    Two names of one tensor would have their gradients summed in another order than autograd's.
    """
    renamed: dict[str, str] = {}

    def current(name: str) -> Ref:
        while name in renamed:
            name = renamed[name]
        return Ref(name)

    for index, node in enumerate(groups.nodes):
        op = node.op
        if any(name in renamed for name in op.inputs):
            op = replace(
                op, args=map_refs(op.args, current), kwargs=map_refs(dict(op.kwargs), current)
            )
            groups.nodes[index] = replace(node, op=op)
        if node.same_as is None:
            continue
        if not node.written:
            groups.dropped.add(index)
            renamed[op.name] = current(node.same_as).name
        elif node.same_as in groups.dataflow.producer:
            renamed[current(node.same_as).name] = op.name
    groups.outputs = [map_refs(out, current) for out in groups.outputs]


def drop_dead(groups: Groups) -> None:
    """Drop what neither the outputs nor the random stream nor a buffer depends on."""
    needed = {out.name for out in groups.outputs if isinstance(out, Ref)}
    roots = {groups.root(name) for name in needed}
    for index in reversed(range(len(groups.nodes))):
        if index in groups.dropped:
            continue
        node = groups.nodes[index]
        writes = any(name in roots or name in groups.buffers for name in node.written)
        if node.op.name in needed or node.is_random or writes:
            needed.update(node.op.inputs)
            roots.update(groups.root(name) for name in node.op.inputs)
            roots.add(groups.root(node.op.name))
        else:
            groups.dropped.add(index)


def merge_views(groups: Groups) -> None:
    """Put every view, and every part of a tuple, into the node that made the storage."""
    producer = groups.dataflow.producer
    for index in groups.alive():
        op = groups.nodes[index].op
        if op.target_name == "getitem" and op.inputs and op.inputs[0] in producer:
            groups.merge(index, producer[op.inputs[0]])
        storages = [groups.root(op.name)]
        if storages[0] is None:  # a tuple: its parts may be views of the input
            storages = [
                info.alias_of
                for part in range(_tuple_length(groups, op.name))
                if (info := groups.dataflow.infos.get(f"{op.name}[{part}]")) is not None
            ]
        for storage in storages:
            maker = (storage or "").split("[")[0]
            if maker in producer and producer[maker] not in groups.dropped:
                groups.merge(index, producer[maker])


def merge_inplace(groups: Groups) -> None:
    """Put an in-place operation, and who read the old content, into the node of its target."""
    producer = groups.dataflow.producer
    readers: dict[str | None, list[int]] = {}
    for index in groups.alive():
        for storage in {groups.root(name) for name in groups.nodes[index].op.inputs}:
            readers.setdefault(storage, []).append(index)
    for index in groups.alive():
        for storage in groups.nodes[index].written:
            maker = storage.split("[")[0]
            if maker not in producer:
                continue
            groups.merge(index, producer[maker])
            for other in readers.get(storage, ()):
                if producer[maker] < other < index:
                    groups.merge(index, other)


def merge_constants(groups: Groups) -> None:
    """Join connected operations that need no gradient and depend on nothing that does.

    Masks, positions and rotary tables come from dozens of tiny operations. What precedes the
    network can be one node without making a circle: all its ancestors are in the same set.
    """
    producer = groups.dataflow.producer
    written_buffers = _written_buffers(groups)
    plain: set[int] = set()
    for index in groups.alive():
        node = groups.nodes[index]
        sources = [producer[name] for name in node.op.inputs if name in producer]
        infos = groups.dataflow.infos
        values = [node.op.name, *(f"{node.op.name}[{i}]" for i in range(8))]
        wants_grad = any(infos[v].requires_grad for v in values if v in infos)
        reads_grad = any(infos[n].requires_grad for n in node.op.inputs if n in infos)
        touches_written = any(name in written_buffers for name in node.op.inputs)
        if wants_grad or reads_grad or node.is_random or node.written or touches_written:
            continue
        if all(source in plain for source in sources):
            plain.add(index)
            for source in sources:
                groups.merge(index, source)


def merge_resident_views(groups: Groups) -> None:
    """Put a view of a parameter, buffer or input into its reader, when there is only one."""
    producer = groups.dataflow.producer
    users = groups.users()
    returned = {out.name for out in groups.outputs if isinstance(out, Ref)}
    for index in reversed(list(groups.alive())):
        op = groups.nodes[index].op
        storage = groups.root(op.name)
        if storage is None:
            part = groups.dataflow.infos.get(f"{op.name}[0]")
            storage = part.alias_of if part is not None else op.name
        if storage.split("[")[0] in producer or op.name in returned:
            continue
        readers = {groups.find(user) for user in users.get(op.name, ())}
        if len(readers) == 1:
            groups.merge(index, readers.pop())


def merge_effects(groups: Groups) -> None:
    """Put an operation that only updates a buffer into the node that follows it."""
    users = groups.users()
    alive = list(groups.alive())
    returned = {out.name for out in groups.outputs if isinstance(out, Ref)}
    for place, index in enumerate(alive):
        node = groups.nodes[index]
        updates = node.written and not any(w in groups.dataflow.producer for w in node.written)
        unread = not users.get(node.op.name) and node.op.name not in returned
        if updates and unread and place + 1 < len(alive):
            groups.merge(index, alive[place + 1])


PASSES: tuple[Pass, ...] = (
    drop_identities,
    drop_dead,
    merge_views,
    merge_inplace,
    merge_constants,
    merge_resident_views,
    merge_effects,
)


def _written_buffers(groups: Groups) -> set[str]:
    written = {name for node in groups.dataflow.nodes for name in node.written}
    return written & set(groups.buffers)


def _tuple_length(groups: Groups, name: str) -> int:
    length = 0
    while f"{name}[{length}]" in groups.dataflow.infos:
        length += 1
    return length
