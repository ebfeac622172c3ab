"""Skips kernels that have run before in a recording: their results have the same layout.

A recording needs the layout of results, not their content, and the layout does not depend on
values. So of twelve equal layers only one is computed. The others get new memory of the same shapes
and strides; it has no content until a running kernel reads it (`blanks`). A skipped kernel that
overwrites a tensor (dropout draws its masks so) leaves it without content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.device.base import Span
from rkgb.elements.tensor_info import storage_id
from rkgb.recording.kernels import traits_of

KERNEL = "kernel"  # the name of spans
_SMALL = 16  # elements; smaller tensors keep their content
_PLAIN = frozenset(
    (bool, int, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)
)
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class _Result:
    """The layouts of the tensors that a kernel returned, each in separate memory."""

    forms: tuple[_Form | None, ...]
    kind: type[Any] | None  # tuple or list; None for a single tensor

    def made_anew(self, blanks: Blanks) -> Any:
        made = [None if form is None else blanks.make(*form) for form in self.forms]
        return made[0] if self.kind is None else self.kind(made)


class RepeatedKernels:
    """Runs each kernel once for each kind of arguments."""

    def __init__(self, blanks: Blanks) -> None:
        self.blanks = blanks
        self.span: Span | None = None  # around each first run, if memory is metered
        self.spans = 0  # how many there were
        self._results: dict[tuple[Any, ...], _Result | None] = {}
        self._overwrites: set[tuple[Any, ...]] = set()
        self.has_repeated = False

    def run(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `func`, or new memory of that layout.

        The kernel must not write, draw random numbers, or return views.
        """
        key = _key(func, args, kwargs)
        if key is None:
            return self.compute(func, args, kwargs)
        if key not in self._results:
            result = self._first(func, args, kwargs)
            self._results[key] = _result(result, set(_storages((args, kwargs))))
            return result
        known = self._results[key]
        if known is None:
            return self.compute(func, args, kwargs)
        self.has_repeated = True
        return known.made_anew(self.blanks)

    def _first(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self.span is None:
            return self.compute(func, args, kwargs)
        self._fill(func, args, kwargs)
        self.spans += 1
        with self.span(KERNEL):
            return func(*args, **kwargs)

    def overwrite(
        self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """Return (the result of `func`, which is its first argument; whether it was skipped).

        The kernel must write only to that argument, whose memory must belong to the step.
        """
        key = _key(func, args, kwargs)
        if key is None:
            return self.compute(func, args, kwargs), False
        first = args[0]
        if key in self._overwrites and _is_without_content(first):
            self.has_repeated = True
            self.blanks.empty(first)
            return first, True
        self._overwrites.add(key)
        return self.compute(func, args, kwargs), False

    def compute(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Fill blank arguments, then return the result of `func`."""
        self._fill(func, args, kwargs)
        return func(*args, **kwargs)

    def _fill(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        if not traits_of(func).reads_nothing:
            self.blanks.fill(args)
            self.blanks.fill(kwargs)


class _OddError(Exception):
    """An argument has a type without a kind."""


def _key(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what is equal for calls whose results have one layout; None if nothing says so."""
    try:
        return func, torch.is_grad_enabled(), _kind(args), _kind(tuple(kwargs.items()))
    except _OddError:
        return None


def _kind(tree: Any) -> Any:
    kind = type(tree)
    if kind is Tensor or kind is torch.nn.Parameter:
        if tree.layout is not torch.strided or tree.is_conj() or tree.is_neg():
            raise _OddError
        return tree.dtype, tree.device, tree.shape, tree.stride()
    if kind is tuple or kind is list:
        return kind, tuple([_kind(value) for value in tree])
    if kind is float:
        return kind, tree.hex()  # 0.0 is not -0.0
    if kind in _PLAIN:
        return kind, tree
    raise _OddError


def _storages(tree: Any) -> Iterator[int]:
    if isinstance(tree, Tensor):
        yield tree.untyped_storage()._cdata
    elif isinstance(tree, (tuple, list, Mapping)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _storages(value)


def _result(result: Any, taken: set[int]) -> _Result | None:
    """Return the layout of a result; None if its content may matter or its memory is shared.

    `taken` are the storages of the arguments. Some kernels, such as `_unsafe_view`, return one of
    them although their schema does not say so.
    """
    kind = None if isinstance(result, Tensor) else type(result)
    if kind not in (None, tuple, list):
        return None
    tensors = [result] if kind is None else list(result)
    forms: list[_Form | None] = []
    storages = set(taken)
    for tensor in tensors:
        if tensor is None:
            forms.append(None)
            continue
        if not isinstance(tensor, Tensor) or not _is_without_content(tensor):
            return None
        storages.add(tensor.untyped_storage()._cdata)
        forms.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device))
    if len(storages) < len(taken) + sum(form is not None for form in forms):
        return None
    return _Result(tuple(forms), kind)


def _is_without_content(tensor: Tensor) -> bool:
    """Return whether a tensor's content does not matter, and it fills its storage."""
    return (
        type(tensor) is Tensor
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() > _SMALL
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes()
        == strided_bytes(tensor.shape, tensor.stride(), tensor.dtype)
    )


def strided_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of fresh memory for a tensor with elements: gaps between them count."""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


_NUMBER = 0.5  # valid for most kernels


class Blanks:
    """Makes such memory, and notes for each storage the type with which to fill it."""

    def __init__(self, types: dict[int, torch.dtype] | None = None) -> None:
        self._types = {} if types is None else types  # the owner removes freed storages

    def make(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return fresh memory."""
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.empty(made)
        return made

    def empty(self, tensor: Tensor) -> None:
        """Note that the content of a tensor's memory does not matter."""
        self._types[storage_id(tensor)] = tensor.dtype

    def fill(self, tree: Any) -> None:
        """Fill the blank tensors among some arguments."""
        if not self._types:
            return
        if isinstance(tree, Tensor):
            self._fill(tree)
        elif isinstance(tree, (tuple, list)):
            for value in tree:
                self.fill(value)
        elif isinstance(tree, Mapping):
            for value in tree.values():
                self.fill(value)

    def _fill(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        dtype = self._types.pop(storage_id(tensor), None)
        if dtype is not None:
            with torch.no_grad():
                whole = torch.empty(0, dtype=dtype, device=tensor.device)
                whole.set_(tensor.untyped_storage()).fill_(_NUMBER)
