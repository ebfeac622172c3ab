"""The passes that make a simplified graph: they drop operations, or merge groups of them.

Each pass works on groups of operations, can be applied alone and keeps the results; see `D_to_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from rkgb.elements.op import Op
from rkgb.graphs.dataflow import DataFlowGraph, DataFlowNode
from rkgb.graphs.uses import live_ops, made_by, roots_of


@dataclass
class Groups:
    """The passes' working state: operations, the dropped ones, and groups (union-find)."""

    dataflow: DataFlowGraph
    nodes: list[DataFlowNode]
    kept: frozenset[str]  # values that the user, the backward or autograd reads
    dropped: set[int]
    parent: list[int]

    @classmethod
    def singletons(cls, dg: DataFlowGraph) -> Groups:
        count = len(dg.nodes)
        read = (name for op in dg.basic.backward for name in op.inputs)
        given = (hand_over.value for hand_over in dg.basic.hand_overs)
        kept = frozenset((*dg.basic.output_names, *read, *given))
        return cls(dg, list(dg.nodes), kept, set(), list(range(count)))

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

    def members(self) -> dict[int, list[int]]:
        """Return the operations of each group by its representative."""
        found: dict[int, list[int]] = {}
        for index in self.alive():
            found.setdefault(self.find(index), []).append(index)
        return found

    def users(self) -> dict[str, list[int]]:
        table: dict[str, list[int]] = {}
        for index in self.alive():
            for name in dict.fromkeys(self.nodes[index].op.inputs):
                table.setdefault(name, []).append(index)
        return table

    @cached_property
    def resident(self) -> frozenset[str]:
        """Storages that exist before the forward and outlive it."""
        return frozenset(map(self.root, self.dataflow.basic.externals))

    def root(self, name: str) -> str:
        return self.dataflow.infos[name].alias_of

    def roots(self, index: int) -> list[str]:
        """Return the storages of an operation's results."""
        return [self.root(name) for name in self.nodes[index].op.results if name]


Pass = Callable[[Groups], None]


def drop_dead(groups: Groups) -> None:
    """Drop operations on which no output, backward, random state or buffer depends."""
    infos = groups.dataflow.infos

    def stays(op: Op) -> bool:
        return op.is_random or not groups.resident.isdisjoint(roots_of(infos, op.writes))

    ops = groups.dataflow.basic.ops
    groups.dropped |= set(range(len(ops))).difference(live_ops(infos, ops, groups.kept, stays))


def merge_views(groups: Groups) -> None:
    """Merge every view with the maker of its storage."""
    producer = groups.dataflow.producer
    for index in groups.alive():
        for storage in groups.roots(index):
            if storage in producer and producer[storage] not in groups.dropped:
                groups.merge(index, producer[storage])


def merge_inplace(groups: Groups) -> None:
    """Merge an in-place operation, and readers of the old content, with the maker of its target."""
    producer = groups.dataflow.producer
    readers: dict[str, list[int]] = {}
    for index in groups.alive():
        for storage in {groups.root(name) for name in groups.nodes[index].op.inputs}:
            readers.setdefault(storage, []).append(index)
    for index in groups.alive():
        for storage in groups.nodes[index].written:
            if storage not in producer:
                continue
            groups.merge(index, producer[storage])
            for other in readers.get(storage, ()):
                if producer[storage] < other < index:
                    groups.merge(index, other)


def merge_constants(groups: Groups) -> None:
    """Merge connected operations that need no gradient and depend on none that does.

    Masks, positions and rotary tables come from dozens of tiny operations. The merged node makes no
    cycle, because all its ancestors are in the same set.
    """
    producer = groups.dataflow.producer
    written = {name for node in groups.dataflow.nodes for name in node.written}
    rewritten = written & groups.resident
    plain: set[int] = set()
    for index in groups.alive():
        node = groups.nodes[index]
        sources = [producer[name] for name in node.op.inputs if name in producer]
        infos = groups.dataflow.infos
        values = (*node.op.inputs, *node.op.results)
        wants_grad = any(infos[name].requires_grad for name in values if name)
        touches_written = any(groups.root(name) in rewritten for name in node.op.inputs)
        if wants_grad or node.op.is_random or node.written or touches_written:
            continue
        if all(source in plain for source in sources):
            plain.add(index)
            for source in sources:
                groups.merge(index, source)


def merge_resident_views(groups: Groups) -> None:
    """Merge a view of a parameter, buffer or input with its only reader."""
    producer = groups.dataflow.producer
    users = groups.users()
    returned = set(groups.dataflow.basic.output_names)
    for index in reversed(list(groups.alive())):
        results = [name for name in groups.nodes[index].op.results if name]
        if any(groups.root(name) in producer or name in returned for name in results):
            continue
        readers = {groups.find(user) for name in results for user in users.get(name, ())}
        if len(readers) == 1:
            groups.merge(index, readers.pop())


def merge_effects(groups: Groups) -> None:
    """Merge an operation that only updates a buffer with the node that follows it."""
    users = groups.users()
    alive = list(groups.alive())
    for place, index in enumerate(alive):
        node = groups.nodes[index]
        updates = node.written and not any(w in groups.dataflow.producer for w in node.written)
        results = node.op.results
        unread = groups.kept.isdisjoint(results) and not any(users.get(n) for n in results)
        if updates and unread and place + 1 < len(alive):
            groups.merge(index, alive[place + 1])


def merge_into_reader(groups: Groups) -> None:
    """Merge an operation with its only reader.

    Suppose that no backward reads its result, and that the reader's result is no larger. Then a
    plan that keeps the reader's result is never worse than one that keeps the operation's. Two
    nodes that both have a backward stay apart: one after the other they need less memory.
    """
    users = groups.users()
    producer, infos = groups.dataflow.producer, groups.dataflow.infos
    working = _with_backward(groups)
    members = groups.members()

    def results(head: int) -> list[str]:
        made = (n for i in members[head] for n in groups.nodes[i].op.results if n)
        return [n for n in made if groups.root(n) in producer]  # no views of resident values

    def read_outside(head: int) -> set[int]:
        heads = {groups.find(user) for name in results(head) for user in users.get(name, ())}
        return heads - {head}

    def left_bytes(head: int) -> int:
        """Return the bytes of results that others read."""
        roots = {
            groups.root(n)
            for n in results(head)
            if n in groups.kept or any(groups.find(u) != head for u in users.get(n, ()))
        }
        return sum(infos[root].counted_bytes for root in roots)

    def reads_nothing(head: int) -> bool:
        names = (name for i in members[head] for name in groups.nodes[i].op.inputs)
        return all(groups.find(producer[name]) == head for name in names if name in producer)

    for start in sorted(members):
        head = groups.find(start)
        nodes = [groups.nodes[i] for i in members[head]]
        if any(node.op.is_random or node.written for node in nodes):
            continue
        readers = read_outside(head)
        if len(readers) != 1 or not groups.kept.isdisjoint(results(head)):
            continue
        reader = readers.pop()
        last, first = max(members[head]), min(members[reader])
        between = {groups.find(i) for i in range(last + 1, first) if i not in groups.dropped}
        if last > first or not all(reads_nothing(other) for other in between):
            continue
        if not (working.isdisjoint(members[head]) or working.isdisjoint(members[reader])):
            continue
        if left_bytes(head) >= left_bytes(reader):
            groups.merge(head, reader)
            both = sorted((*members.pop(head), *members.pop(reader)))
            members[groups.find(head)] = both


def _with_backward(groups: Groups) -> set[int]:
    """Return the operations whose backward computes more than views."""
    basic = groups.dataflow.basic
    owner: dict[int, int] = {}
    for index in groups.alive():
        owner.setdefault(groups.nodes[index].op.sequence_nr, index)
    found = set()
    for op in basic.backward:
        if (op.writes or made_by(basic.infos, op)) and op.sequence_nr in owner:
            found.add(owner[op.sequence_nr])
    return found


PASSES: tuple[Pass, ...] = (
    drop_dead,
    merge_views,
    merge_inplace,
    merge_constants,
    merge_resident_views,
    merge_effects,
)
# For a graph that is planned: fewer nodes, without losing a plan that could be best.
PLANNED_PASSES: tuple[Pass, ...] = (*PASSES, merge_into_reader)
