"""Fingerprints of tensors, for comparing without keeping them: type, shape, and two sums over bits.

Copies of all gradients would take twice the memory of all parameters, when memory is short. The
sums are integer sums, which do not depend on the order of additions. They are computed on the host
in small parts, in memory that was allocated before, so nothing is allocated while a step is
metered. numpy computes them, because torch's profiler would record thousands of small operations,
and these records would take more memory than the copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rockmate.guards.sharded import local_part

_PIECE = 1 << 16  # elements
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal for equal bits; for different bits it differs with very high probability."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    plain_sum: int
    weighted_sum: int


class Fingerprints:
    """Computes fingerprints in preallocated memory."""

    def __init__(self) -> None:
        self._raw = {
            size: torch.empty(_PIECE, dtype=dtype, device="cpu") for size, dtype in _BITS.items()
        }
        self._whole = np.empty(_PIECE, np.int64)
        self._weights = np.arange(1, _PIECE + 1)

    def of(self, value: Any) -> Any:
        """Return the fingerprint of a tensor; other values are returned unchanged."""
        if not isinstance(value, Tensor):
            return value
        value = local_part(value)
        if value.is_sparse:
            return tuple(value.shape), self.of(value._indices()), self.of(value._values())
        plain = weighted = 0
        with torch.no_grad():
            start = 0
            for piece in self._arrays(_bits(value.detach())):
                first, second = self._sums(piece)
                plain += first
                weighted += second + start * first
                start += piece.size
        return Fingerprint(value.dtype, tuple(value.shape), plain % _WORD, weighted % _WORD)

    def _arrays(self, bits: Tensor) -> Iterator[Any]:
        """Return the elements in order, as small arrays on the host."""
        if bits.device.type == "cpu" and bits.is_contiguous():
            if not bits.numel():
                return
            # Not bits.numpy(), because a storage that numpy has accessed can no longer be resized,
            # which is how FSDP frees it.
            size = bits.numel() * bits.element_size()
            memory: Any = (ctypes.c_char * size).from_address(bits.data_ptr())
            kind = self._raw[bits.element_size()].numpy().dtype
            whole = np.frombuffer(memory, kind)
            yield from (whole[at : at + _PIECE] for at in range(0, whole.size, _PIECE))
            return
        for piece in _pieces(bits):
            here = self._raw[bits.element_size()][: piece.numel()]
            here.view(piece.shape).copy_(piece)
            yield here.numpy()

    def _sums(self, piece: Any) -> tuple[int, int]:
        count = piece.size
        weighted = np.multiply(piece, self._weights[:count], out=self._whole[:count])
        return int(piece.sum(dtype=np.int64)), int(weighted.sum())


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bits as integers."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield small views of a tensor, in the order of its elements, whatever its strides."""
    if tensor.numel() <= _PIECE:
        if tensor.numel():
            yield tensor
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(_PIECE)
        return
    rows = _PIECE // max(1, tensor[0].numel())
    for part in tensor.split(rows) if rows else tensor.unbind(0):
        yield from _pieces(part)
