"""Steps that move storages: moves drawn at random, copies that take time, and runs by hand."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.copies import Copies, Host
from rkgb.copies.workers import Worked
from rkgb.elements.op import Op
from rkgb.elements.sample import Sample
from rkgb.engine import compile_step, plain_callee, record
from rkgb.graphs.basic import external_values
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.run import RootMove, StepProgram, movable_roots
from rkgb.run.graph.node_storages import NodeStorage, storages_of
from rkgb.run.graph.views import runnable
from rkgb.run.program.places import Step
from rkgb.torch_api.private.autograd import straight_to_kernels


def steps_of(graph: SimplifiedGraph, draw: random.Random | None = None) -> list[Step]:
    """Return the steps of a plan, with a few recomputations if there is what draws them."""
    count = len(graph.nodes)
    steps: list[Step] = [
        ("B", k)
        for k in reversed(range(count))
        if graph.nodes[k].backward or graph.nodes[k].hand_overs
    ]
    for _ in range(draw.randrange(4) if draw else 0):
        assert draw is not None
        steps.insert(draw.randrange(len(steps) + 1), ("F", draw.randrange(count)))
    forwards: list[Step] = [("F", k) for k in range(count)]
    return [*forwards, *steps]


def drawn_moves(
    graph: SimplifiedGraph, steps: Sequence[Step], draw: random.Random, share: float = 0.7
) -> list[RootMove]:
    """Return moves of storages in this share of the gaps between two uses of one."""
    found = []
    for storage in _movable(graph):
        uses = _uses(storage, steps)
        earliest = 0
        for (before, is_made), (after, is_made_then) in itertools.pairwise(uses):
            if is_made:
                earliest = before
            if is_made_then or after - before < 2 or draw.random() > share:
                continue
            gone = draw.randrange(before, after)
            back = draw.randrange(gone + 1, after + 1)
            found.append(RootMove(storage.root, draw.randrange(earliest, gone + 1), gone, back))
            earliest = back
    draw.shuffle(found)
    return found


def moves_to_the_backward(graph: SimplifiedGraph, steps: Sequence[Step]) -> list[RootMove]:
    """Return a move of each storage that can: from its last use in the forward to its first behind.

    A copy has the time of one step.
    """
    count, found = len(graph.nodes), []
    for storage in _movable(graph):
        uses = [t for t, _ in _uses(storage, steps)]
        last, back = max(t for t in uses if t < count), min(t for t in uses if t >= count)
        gone = min(last + 1, count - 1)
        found.append(RootMove(storage.root, last, gone, max(gone + 1, back - 1)))
    return found


def _movable(graph: SimplifiedGraph) -> list[NodeStorage]:
    movable = movable_roots(graph)
    return [
        storage
        for made in storages_of(graph)
        for storage in made
        if storage.root in movable and storage.bwd_users
    ]


def _uses(storage: NodeStorage, steps: Sequence[Step]) -> list[tuple[int, bool]]:
    """Return the steps that use a storage, and whether each makes it."""
    users = {"F": (storage.producer, *storage.fwd_users), "B": storage.bwd_users}
    return [
        (t, kind == "F" and node == storage.producer)
        for t, (kind, node) in enumerate(steps)
        if node in users[kind]
    ]


class SlowHost(Host):
    """Copies to memory of the host, each of which begins after a moment."""

    def __init__(self, draw: random.Random, most_ms: float = 1.0) -> None:
        super().__init__()
        self._draw, self._most_s = draw, most_ms / 1e3

    def _run(self, direction: str, held: list[object], offset: int) -> None:
        time.sleep(self._draw.random() * self._most_s)
        super()._run(direction, held, offset)


class CheckedHost(SlowHost):
    """Raises where a storage is used in a way that a copy of it, which may still run, forbids."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self._running: dict[int, str] = {}  # by the number of the storage

    def _start(self, direction: str, held: list[object], offset: int) -> Worked:
        storage = held[0]
        assert isinstance(storage, torch.UntypedStorage)
        key = int(storage._cdata)
        assert key not in self._running
        self._running[key] = direction
        return _Watched(super()._start(direction, held, offset), self._running, key)

    def callee(self, op: Op) -> Callable[..., Any]:
        """Return the function that runs an operation, after a look at its arguments."""
        function, places = plain_callee(op), range(len(op.inputs))
        written = {op.inputs.index(name) for name in op.writes if name in op.inputs}

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            for place, tensor in zip(places, tensors, strict=True):
                storage = tensor.untyped_storage()
                direction = self._running.get(int(storage._cdata))
                assert direction != "back", f"{op} reads what has not arrived"
                assert direction is None or place not in written, f"{op} writes what is copied"
                assert storage.nbytes() or not tensor.numel(), f"{op} reads what is away"
            return function(*args, **kwargs)

        return call


class _Watched(Worked):
    __slots__ = ("_key", "_running")

    def __init__(self, copy: Worked, running: dict[int, str], key: int) -> None:
        super().__init__(copy._future)
        self._running, self._key = running, key

    def join(self) -> None:
        super().join()
        del self._running[self._key]


class Layers(nn.Module):
    """Layers of kernels that take no workspace."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * x.sigmoid()
        return x


class MovingStep:
    """A step of a network with moves, run by hand."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.graph = runnable(D_to_S(B_to_D(record(model, Sample.of(model, x))))).graph
        self.steps = steps_of(self.graph)

    def compile(self, program: StepProgram, copies: Copies) -> None:
        self.compiled = compile_step(self.graph, program, plain_callee, copies)

    def forward(self, *, again: bool = False) -> tuple[list[Tensor], list[Any]]:
        """Return the results, and what the backward takes."""
        external = external_values(self.graph.basic, self.model, (self.x,))
        run = self.compiled.forward_again if again else self.compiled.forward
        with straight_to_kernels(), torch.enable_grad():
            return run([external[name] for name in self.compiled.program.externals])

    def backward(self, saved: list[Any], tangent: Tensor) -> Iterator[list[Tensor]]:
        """Yield what is handed over to autograd, as a list to empty."""
        with straight_to_kernels(), torch.no_grad():
            yield from self.compiled.backward(saved, [tangent])

    def gradients(self, saved: list[Any]) -> list[Tensor]:
        """Return the parts of gradients in the order in which they are handed over."""
        return [g for given in self.backward(saved, torch.ones_like(self.x)) for g in given]
