"""Finds where two recordings of the same call differ.

Call and module are equal, so each difference is a decision of Python's by something else: an
unguarded value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.module_paths import around
from rkgb.elements.numbers import is_unspecialised
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import Target, target_of
from rkgb.elements.tensor_info import same_bits
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


def _is_same_call(a: Op, b: Op) -> bool:
    """Return whether two operations differ only in plain values among their arguments."""
    return (
        _is_same_target(a.target, b.target)
        and (a.name, a.results, a.writes, a.flags) == (b.name, b.results, b.writes, b.flags)
        and a.inputs == b.inputs
        and len(a.args) == len(b.args)
        and list(a.kwargs) == list(b.kwargs)
    )


def _is_same_target(a: Any, b: Any) -> bool:
    return bool(a is b or a == b) or (isinstance(a, Target) and a.is_of_kind(b))


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
