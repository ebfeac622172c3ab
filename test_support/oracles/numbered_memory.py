"""The memory of a step as numbers: equal ones for equal contents, whoever computed them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph

AS_STRIDED = torch.ops.aten.as_strided.default
# While training they write their statistics (arguments 3 and 4) and do not look at them.
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
# Kernels that work element by element, and how they write over a gradient that nobody reads later.
_aten = torch.ops.aten
_EITHER = {_aten.add.Tensor: _aten.add_.Tensor, _aten.mul.Tensor: _aten.mul_.Tensor}  # operand
WRITES_OVER = _EITHER | {
    getattr(_aten, f"{name}_backward").default: getattr(_aten, f"{name}_backward").grad_input
    for name in ("threshold", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "hardtanh")
}
Geometry = tuple[Hashable, ...]  # type, shape, strides, offset


@dataclass(frozen=True)
class Variable:
    storage: int
    geometry: Geometry


class NumberedMemory:
    """Variables, the storages that they look at, what is in these, and the random state."""

    def __init__(self, infos: Mapping[str, TensorInfo], numbers: dict[Hashable, int]) -> None:
        self.infos, self.numbers = infos, numbers
        self.variables: dict[str, Variable] = {}
        self.content: dict[int, int] = {}
        self.kept_random: dict[str, int] = {}
        self.random = self._number("random")
        self.latest: dict[str, int] = {}  # value that makes a storage -> the last that it made

    def _number(self, *what: Hashable) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def add_external(self, name: str) -> None:
        root = self.infos[name].alias_of
        if root not in self.latest:
            self.latest[root] = self._new(self._number("external", root))
        self.variables[name] = Variable(self.latest[root], _geometry(self.infos[name]))

    def begin_backward(self, tangents: Sequence[str]) -> None:
        """Take the gradients of the outputs; the user may have drawn random numbers since."""
        self.random = self._number("random between")
        for name in tangents:
            self.add_external(name)

    def root(self, name: str) -> str:
        """Return the value that made the memory of a value."""
        return self.infos[name].alias_of

    def storage_of(self, name: str) -> int | None:
        """Return the storage of a variable; None where it is a random state."""
        return self.variables[name].storage if name in self.variables else None

    def seen(self, name: str) -> tuple[int, Geometry]:
        """Return what a reader of the variable finds."""
        variable = self.variables[name]
        return self.content[variable.storage], variable.geometry

    def copy(self, name: str, source: str) -> None:
        content, geometry = self.seen(source)
        self.variables[name] = Variable(self._new(content), geometry)

    def call(self, op: Op, recorded: Op) -> int:
        """Follow an operation, and return a number for what it computes."""
        args: tuple[Any, ...] = op.args
        if recorded.target_name in _BATCH_NORMS and len(args) > 5 and args[5] is True:
            args = (*args[:3], *args[5:])
        kwargs = op.kwargs
        over = overwritten(op, recorded)
        if over is not None:  # it computes what the kernel with memory of its own does
            kwargs = {key: value for key, value in kwargs.items() if key != "grad_input"}
        target = op.target if over is None else recorded.target
        found: Hashable = tuple(map(self._text, args))
        if target in _EITHER and not kwargs:
            found = frozenset(map(self._text, args))
        random = self.random if recorded.is_random else None
        number = self._number(str(target), found, self._text(kwargs), random)
        if over is not None:
            storage = self.variables[over].storage
            self.content[storage] = self._number("made", number, 0)
            self.variables[op.results[0]] = Variable(storage, _geometry(self.infos[op.results[0]]))
            return number
        if recorded.is_random:
            self.random = self._number("random after", number)
        for place, name in enumerate(op.writes):
            storage = self.variables[name].storage
            self.content[storage] = self._number("written", number, place, self.content[storage])
        made = zip(op.results, recorded.results, strict=True)
        for place, (name, like) in enumerate(made):
            if name:
                self.variables[name] = self._result(number, place, op, recorded, like)
        return number

    def _result(self, number: int, place: int, op: Op, recorded: Op, like: str) -> Variable:
        if op.target is AS_STRIDED and not op.writes:  # in place of any view
            base, shape, strides, *offset = op.args
            source = self.variables[base.name]
            there = offset[0] if offset else source.geometry[3]
            shown = (source.geometry[0], tuple(shape), tuple(strides), there)
            return Variable(source.storage, shown)
        root, geometry = self.infos[like].alias_of, _geometry(self.infos[like])
        if root == like or (recorded.target in WRITES_OVER and not recorded.writes):
            self.latest[root] = self._new(self._number("made", number, place))
            return Variable(self.latest[root], geometry)
        for theirs, ours in pairs_of_names((recorded.args, recorded.kwargs), (op.args, op.kwargs)):
            if self.infos[theirs].alias_of == root:
                return Variable(self.variables[ours].storage, geometry)
        return Variable(self.latest[root], geometry)

    def _new(self, content: int) -> int:
        self.content[len(self.content)] = content
        return len(self.content) - 1

    def _text(self, tree: Any) -> Hashable:
        if isinstance(tree, Ref):
            return self.seen(tree.name)
        if isinstance(tree, Mapping):
            return tuple((key, self._text(value)) for key, value in tree.items())
        if isinstance(tree, (list, tuple)):
            return tuple(map(self._text, tree))
        return repr(tree)


class FollowedRecording:
    """What each operation of a recorded step computes, and what is there in the end."""

    def __init__(self, basic: BasicGraph, numbers: dict[Hashable, int]) -> None:
        self.ops = {op.name: op for op in (*basic.ops, *basic.backward)}
        self.buffers = tuple(basic.buffers)
        infos = basic.infos
        self.written = {infos[n].alias_of for op in self.ops.values() for n in op.writes}
        self.tangents = tuple(name for name in basic.tangent_names if name is not None)
        memory = NumberedMemory(basic.infos, numbers)
        for name in basic.externals:
            memory.add_external(name)
        self.computes = {op.name: memory.call(op, op) for op in basic.ops}
        self.outputs = {n: memory.seen(n) for n in basic.output_names}
        self.forward_end = self._end(memory)
        memory.begin_backward(self.tangents)
        self.computes.update((op.name, memory.call(op, op)) for op in basic.backward)
        self.backward_end = self._end(memory)
        self.gradients: dict[str, list[tuple[int, Geometry]]] = {}
        for hand_over in basic.hand_overs:
            self.gradients.setdefault(hand_over.leaf, []).append(memory.seen(hand_over.value))

    def _end(self, memory: NumberedMemory) -> tuple[int, dict[str, tuple[int, Geometry]]]:
        return memory.random, {name: memory.seen(name) for name in self.buffers}


def overwritten(op: Op, recorded: Op) -> str | None:
    """Return the variable in whose memory the result lies now, unlike when it was recorded."""
    if op is recorded or WRITES_OVER.get(recorded.target) is not op.target:
        return None
    return op.writes[0]


def _geometry(info: TensorInfo) -> Geometry:
    return info.dtype, info.shape, info.stride, info.offset


def pairs_of_names(theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    """Yield the names that stand in the same places of two trees."""
    if isinstance(theirs, Ref) and isinstance(ours, Ref):
        yield theirs.name, ours.name
    elif isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in theirs:
            yield from pairs_of_names(theirs[key], ours.get(key))
    elif isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        for left, right in zip(theirs, ours, strict=False):
            yield from pairs_of_names(left, right)
