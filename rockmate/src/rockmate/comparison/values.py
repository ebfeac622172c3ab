"""Values of some results: those of a first step are kept, others are compared as they come.

Fingerprints say that two results differ, and not by how much. Values of all gradients of several
steps would take many times the memory of the parameters on the host. So only the values of one step
are kept, and only of the results that differ. A result of another step is compared where it lies,
piece by piece, and then dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rockmate.guards.sharded import local_part

_PIECE = 1 << 20  # elements that are compared at once, in double precision


@dataclass(frozen=True)
class Values:
    """Takes the results `names` of a step: copies on the host, or how far they are from `first`."""

    names: Collection[str]
    first: Mapping[str, Any] | None = None

    def of(self, name: str, value: Any) -> Any:
        """Return a copy, a distance, or None where it is of no interest."""
        if name not in self.names:
            return None
        if self.first is not None:
            return distance(self.first[name], value)
        return _plain(value).to("cpu", copy=True) if isinstance(value, Tensor) else value


def distance(known: Any, value: Any) -> float:
    """Return the norm of the difference of two results; two NaN count as equal."""
    if not isinstance(known, Tensor) or not isinstance(value, Tensor):
        return 0.0 if type(known) is type(value) and known == value else math.inf
    value = _plain(value)
    if known.shape != value.shape or known.dtype != value.dtype:
        return math.inf
    squares = 0.0
    for a, b in zip(_pieces(known), _pieces(value), strict=True):
        a = a.to(b.device)
        same = (a == b) | ((a != a) & (b != b))
        apart = torch.where(same, 0.0, a.to(_wide(a)) - b.to(_wide(b)))
        squares += float(torch.linalg.vector_norm(apart)) ** 2
    return math.sqrt(squares)


def norm(value: Any) -> float:
    """Return the norm of a result that was kept."""
    if not isinstance(value, Tensor):
        return 0.0
    parts = (float(torch.linalg.vector_norm(p.to(_wide(p)))) ** 2 for p in _pieces(value))
    return math.sqrt(sum(parts))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _plain(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor.detach())
    return tensor.to_dense() if tensor.is_sparse else tensor


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into pieces in the order of its elements; two of one shape alike."""
    rows = max(1, _PIECE * len(tensor) // max(1, tensor.numel())) if tensor.dim() else 1
    for part in tensor.split(rows) if tensor.dim() else (tensor,):
        whole = part.numel() <= _PIECE or part.dim() < 2
        yield from (part,) if whole else _pieces(part.flatten(0, 1))
