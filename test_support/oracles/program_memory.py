"""The memory of a program by its statements alone, without workspaces of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.run.program.statements import Call, Drop, Give, MoveOut, Moving, Statement, StepProgram


class SaidMemory:
    """The storages that a step has made, with the variables that hold each."""

    def __init__(self, graph: SimplifiedGraph, program: StepProgram) -> None:
        self._infos, self._program = graph.infos, program
        self._holders: list[set[str]] = []  # by the number of the storage
        self._sizes: list[int] = []
        self._latest: dict[str, int] = {}  # by the value that makes it
        self._moved: dict[str, int] = {}
        self._away: set[int] = set()

    def peaks(self) -> tuple[int, int, int]:
        """Return the bytes at the peak of the forward, between, and at the peak of the backward.

        Without parameters and inputs, and without the gradients of the outputs.
        """
        program = self._program
        forward = max(self._followed(program.forward), default=0)
        kept = {*program.saved, *program.outputs}
        for held in self._holders:
            held &= kept
        between = self._alive()
        for held in self._holders:
            held &= set(program.saved)
        return forward, between, max([self._alive(), *self._followed(program.backward)])

    def _alive(self) -> int:
        pairs = enumerate(zip(self._holders, self._sizes, strict=True))
        return sum(size for n, (held, size) in pairs if held and n not in self._away)

    def _followed(self, statements: Sequence[Statement]) -> Iterator[int]:
        for statement in statements:
            match statement:
                case Call(op, frees):
                    assert not frees
                    for name in filter(None, op.results):
                        self._make(name)
                    yield self._alive()
                case Drop(names) | Give(dropped=names):
                    for held in self._holders:
                        held.difference_update(names)
                case MoveOut(name, source):
                    self._moved[name] = self._latest[self._infos[source].alias_of]
                case Moving(name, "leave"):
                    self._away.add(self._moved[name])
                case Moving(name, "back"):
                    self._away.remove(self._moved[name])
                    yield self._alive()

    def _make(self, name: str) -> None:
        for held in self._holders:
            held.discard(name)
        plain = name.removesuffix("_again")  # of a result that the user holds
        info = self._infos[plain]
        root = info.alias_of + name.removeprefix(plain)
        if root == name:
            self._latest[root] = len(self._sizes)
            self._sizes.append(info.storage_bytes)
            self._holders.append(set())
        if root in self._latest:
            self._holders[self._latest[root]].add(name)
