"""Where two recordings differ, and whether they are one program.

If call and module are equal, each difference is a decision of Python's by something else: an
unguarded value. If only a temperature, a probability or a step size differs, the recordings have
the same operations on the same sizes. So they have the same costs, and the same plan serves both.
If only the length of a batch differs, they have the same operations on other sizes. So costs
differ, and a schedule of one is a schedule of the other.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.module_paths import around
from rkgb.elements.numbers import is_unspecialised
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import Target, target_of
from rkgb.elements.tensor_info import TensorInfo, same_bits
from rkgb.errors import shown
from rkgb.graphs.basic import BasicGraph


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a step now and its recording."""

    module_path: str  # of the innermost submodule around it
    source: str  # "file.py:12"
    what: str

    def __str__(self) -> str:
        return f"module '{self.module_path or '(root)'}' ({self.source or 'unknown'}): {self.what}"


def differences(
    known: BasicGraph, found: BasicGraph, numbers: Sequence[float] = ()
) -> list[Difference]:
    """Return the differences of `found` from `known`, up to the first other operation.

    `numbers` are the unspecialised numbers of `known` for this call.
    """
    made = _Differences(known, found, numbers)
    if made.operations(known.ops, found.ops) and made.operations(known.backward, found.backward):
        made.values()
    return list(dict.fromkeys(made.found))


def forward_differences(
    known: BasicGraph, found: BasicGraph, numbers: Sequence[float] = ()
) -> list[Difference]:
    """Return the differences between the operations of two forwards."""
    made = _Differences(known, found, numbers)
    made.operations(known.ops, found.ops)
    return list(dict.fromkeys(made.found))


def run_alike(ours: Sequence[Op], theirs: Sequence[Op]) -> bool:
    """Return whether two forwards run the same operations on the same values."""
    return len(ours) == len(theirs) and all(
        _is_same_call(a, b) and repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))
        for a, b in zip(ours, theirs, strict=True)
    )


class _Differences:
    def __init__(self, known: BasicGraph, found: BasicGraph, numbers: Sequence[float]) -> None:
        self.known, self.now, self.numbers = known, found, numbers
        self.found: list[Difference] = []
        # The two have different sequence numbers of autograd's.
        self.made_by = [{op.sequence_nr: op for op in reversed(g.ops)} for g in (known, found)]

    def operations(self, ours: Sequence[Op], theirs: Sequence[Op]) -> bool:
        """Compare operations; return whether all of them correspond."""
        for a, b in zip_longest(ours, theirs):
            if a is None or b is None or not _is_same_call(a, b):
                was, now = ("nothing" if op is None else _named(op) for op in (a, b))
                places = [self._place(op, turn) for turn, op in enumerate((a, b)) if op is not None]
                path = around([path for path, _ in places] if len(places) > 1 else [""])
                self._note(path, places[-1][1], f"ran {was} when it was recorded, and {now} now")
                return False
            changed = next(self._arguments(a, b), None)
            if changed is not None:
                path, source = self._place(b)
                if target_of(b).runs_python:  # the caller of an opaque call has decided
                    path = path.rpartition(".")[0]
                was, now = (shown(value) for value in changed)
                self._note(
                    path, source, f"'{b.target_name}' took {was} when recorded, and takes {now} now"
                )
        return True

    def values(self) -> None:
        """Compare constants, results that are no tensors, and attributes that are set."""
        readers: dict[str, Op] = {}
        for op in self.now.ops:
            for name in op.inputs:
                readers.setdefault(name, op)
        for name, value in self.known.constants.items():  # constants of a backward may be stand-ins
            if name in readers and not _is_same_content(value, self.now.constants.get(name)):
                path, source = self._place(readers[name])
                self._note(path, source, f"the content of a tensor made there, '{name}', differs")
        ours, theirs = (_assigned(g.effects) for g in (self.known, self.now))
        for path, name in sorted(ours ^ theirs):
            self._note(path, "", f"its attribute '{name}' is set at one call, and not at another")
        if ours != theirs:  # their values are among the outputs
            return
        for was, now in zip_longest(self.known.outputs, self.now.outputs):
            if not self._is_same(was, now) and (_is_plain(was) or _is_plain(now)):
                self._note("", "", f"gave {shown(was)} when recorded, and gives {shown(now)} now")

    def _arguments(self, a: Op, b: Op) -> Iterator[tuple[Any, Any]]:
        for was, now in zip(_given(a), _given(b), strict=True):
            if not self._is_same(was, now):
                yield was, now
        for name, was in a.kwargs.items():
            if not self._is_same(was, b.kwargs[name]):
                yield was, b.kwargs[name]

    def _is_same(self, a: Any, b: Any) -> bool:
        if is_unspecialised(a):
            a = self.numbers[a.place] if a.place < len(self.numbers) else a
        kind = type(a)
        if kind is not type(b):
            return False
        if kind is tuple or kind is list:
            return len(a) == len(b) and all(map(self._is_same, a, b))
        if kind is float:
            return bool(a.hex() == b.hex())
        if kind is Ref:
            return bool(a.name == b.name)
        if isinstance(a, Mapping):
            return list(a) == list(b) and all(self._is_same(a[key], b[key]) for key in a)
        return a is b or not _is_plain(a) or repr(a) == repr(b)

    def _place(self, op: Op, recording: int = 1) -> tuple[str, str]:
        """Return module and source of an operation, for the backward those of its forward."""
        if not op.source:
            op = self.made_by[recording].get(op.sequence_nr, op)
        return op.module_path, op.source

    def _note(self, path: str, source: str, what: str) -> None:
        self.found.append(Difference(path, source, what))


def _is_same_call(a: Op, b: Op, alike: str = "is_of_kind") -> bool:
    """Return whether two operations differ only in plain values among their arguments.

    `alike` is how targets that are none of torch's tell that others stand for them.
    """
    ours, theirs = a.target, b.target
    same = ours is theirs or ours == theirs
    return (
        bool(same or (isinstance(ours, Target) and getattr(ours, alike)(theirs)))
        and (a.name, a.results, a.writes, a.flags) == (b.name, b.results, b.writes, b.flags)
        and a.inputs == b.inputs
        and len(a.args) == len(b.args)
        and list(a.kwargs) == list(b.kwargs)
    )


def _given(op: Op) -> Sequence[Any]:
    """Return the arguments of an operation, for an opaque call with its plain values."""
    whole = target_of(op).whole
    return op.args if whole is None else [*op.args, *whole.plain_values]


def _assigned(effects: Sequence[Any]) -> set[tuple[str, str]]:
    return {(effect.path, effect.name) for effect in effects if hasattr(effect, "name")}


def _is_plain(value: Any) -> bool:
    return isinstance(
        value, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    )


def _is_same_content(a: Tensor, b: Any) -> bool:
    if a is b or type(a) is not type(b) or a.device != b.device:
        return a is b
    with torch.no_grad():
        return same_bits(a, b)


def _named(op: Op) -> str:
    return f"'{op.target_name}' ({op.module_path or '(root)'}, {op.source or 'backward'})"


_STRUCTURE = (
    *("hand_overs", "parameters", "buffers", "output_names", "roots"),
    *("tangent_names", "device", "model_name", "opaque", "effects", "flows"),
)
# Facts about a tensor that do not depend on its size.
_UNSIZED = operator.attrgetter("dtype", "alias_of", "requires_grad", "is_on_host", "is_conj")
_Values = Callable[[Any, Any, bool], bool]  # two arguments, and whether they are scalars


def same_but_for_numbers(a: BasicGraph, b: BasicGraph) -> bool:
    """Return whether two recordings differ only in scalar arguments of operations."""
    return a.infos == b.infos and a.kind == b.kind and _same_program(a, b, _same_value)


def same_but_for_sizes(a: BasicGraph, b: BasicGraph) -> bool:
    """Return whether two recordings differ only in numbers, shapes and strides."""
    if a.infos.keys() != b.infos.keys() or a.kind.autocast != b.kind.autocast:
        return False
    pairs = zip(a.infos.values(), b.infos.values(), strict=True)
    return all(_of_one_rank(x, y) for x, y in pairs) and _same_program(a, b, _same_but_for_size)


def _same_program(a: BasicGraph, b: BasicGraph, same: _Values) -> bool:
    if any(_of_steps(getattr(a, name)) != _of_steps(getattr(b, name)) for name in _STRUCTURE):
        return False
    if _without_numbers_at_the_end(a.inputs) != _without_numbers_at_the_end(b.inputs):
        return False
    return (
        list(a.constants) == list(b.constants)
        and len(a.outputs) == len(b.outputs)
        and all(_same_operations(x, y, same) for x, y in ((a.ops, b.ops), (a.backward, b.backward)))
    )


def _of_one_rank(a: TensorInfo, b: TensorInfo) -> bool:
    return len(a.shape) == len(b.shape) and _UNSIZED(a) == _UNSIZED(b)


def _of_steps(value: Any) -> Any:
    """Return hand-overs without autograd's sequence numbers, which differ from step to step."""
    if isinstance(value, tuple) and value and hasattr(value[0], "leaf"):
        return tuple((h.leaf, h.value) for h in value)
    return value


def _without_numbers_at_the_end(inputs: Sequence[str | None]) -> tuple[str | None, ...]:
    """Return the inputs up to the last tensor; numbers that are attributes may follow it."""
    count = max((place for place, name in enumerate(inputs, 1) if name is not None), default=0)
    return tuple(inputs[:count])


def _same_operations(first: Sequence[Op], second: Sequence[Op], same: _Values) -> bool:
    return len(first) == len(second) and all(
        _same_operation(a, b, same) for a, b in zip(first, second, strict=True)
    )


def _same_operation(a: Op, b: Op, same: _Values) -> bool:
    if a.is_random != b.is_random or not _is_same_call(a, b, "costs_as"):
        return False
    order, scalars = _scalars_of(a.target)
    is_whole = target_of(a).whole is not None
    pairs = [
        (order[i] if i < len(order) else "", x, y)
        for i, (x, y) in enumerate(zip(a.args, b.args, strict=True))
    ]
    pairs += [(name, a.kwargs[name], b.kwargs[name]) for name in a.kwargs]
    return all(same(x, y, is_whole or name in scalars) for name, x, y in pairs)


_SCALARS = ("number", "Optional[number]", "Tensor")


@functools.lru_cache(maxsize=4096)
def _scalars_of(target: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of an operation's arguments, and of those in which a number is a scalar.

    `mul.Tensor` accepts a number in place of a tensor.
    """
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    names = tuple(argument.name for argument in arguments)
    return names, frozenset(x.name for x in arguments if str(x.type) in _SCALARS)


def _kind(value: Any) -> type:
    kind = type(value)
    return value.kind if is_unspecialised(value) else kind


def _same_value(a: Any, b: Any, is_scalar: bool, *, any_int: bool = False) -> bool:
    kind = _kind(a)
    if kind is not _kind(b):
        return False
    if kind is float or (kind is int and (is_scalar or any_int)):
        return True
    if kind in (list, tuple):
        same = functools.partial(_same_value, is_scalar=False, any_int=any_int)
        return len(a) == len(b) and all(map(same, a, b))
    if kind is Ref:
        return bool(a.name == b.name)
    return a is b or bool(a == b)


_same_but_for_size = functools.partial(_same_value, any_int=True)
