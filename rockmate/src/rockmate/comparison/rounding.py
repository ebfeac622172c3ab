"""Is a compiled step as near to an eager one as rounding lets it be?

Compiled kernels add in another order and keep more digits in between. A wrong kernel, or one that
reads its input in the wrong order, is off by as much as the values themselves. In between lies the
square root of the precision, and it is the bound here. A gradient that is nothing but rounding (of
a bias in front of a norm) has no size of its own: it may be off by some roundings of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rkgb.elements import TensorInfo
from rockmate.comparison.agreement import refuse
from rockmate.comparison.eager import GRADIENT, StepResult, equal_values, named_results

_ROUNDINGS = 16.0


def coarsest_type(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Return the least precise floating type among values."""
    kinds = {info.dtype for info in infos if info.dtype.is_floating_point}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)


def compare_rounded(eager: StepResult, ours: StepResult, name: str, kind: torch.dtype) -> str:
    """Compare two steps up to rounding in `kind`, and return in words how far they are apart.

    The random stream and everything that is no floating number must be the same.

    Raises:
        SelfTestError: something is farther off.
    """
    theirs, given = named_results(eager), named_results(ours)
    eps = torch.finfo(kind).eps
    bound = math.sqrt(eps)
    wrong = [] if len(eager.outputs) == len(ours.outputs) else ["the number of outputs"]
    if not eager.stream.equals(ours.stream):
        wrong.append("the random stream after the step")
    largest = max((_mean_size(v) for n, v in theirs.items() if n.startswith(GRADIENT)), default=0.0)
    worst, where = 0.0, ""
    for key, value in theirs.items():
        found = given.get(key)
        if found is None or not _are_floating(value, found):
            wrong += [] if equal_values(value, found) else [key]
            continue
        lent = _ROUNDINGS * eps / bound * largest if key.startswith(GRADIENT) else 0.0
        apart = _apart(value, found, lent)
        if not apart <= bound:  # not a number, too
            wrong.append(f"{key} (by {apart:.1e} of its size)")
        elif apart >= worst:
            worst, where = apart, key
    text = f"within {worst:.1e} of eager ({where}; up to {bound:.1e} is rounding)"
    refuse(wrong, name, "Compiled pieces are held to eager's values up to rounding")
    return text


def _are_floating(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and (a.is_floating_point() or a.is_complex())
    )


def _mean_size(value: Any) -> float:
    """Return the root of the mean square of the elements; 0 where there are none."""
    if not isinstance(value, Tensor) or not value.numel() or not value.is_floating_point():
        return 0.0
    return float(value.double().square().mean().sqrt())


def _apart(a: Tensor, b: Tensor, lent: float) -> float:
    """Return how far two results are apart, over the size of the first."""
    if not a.numel() or equal_values(a, b):
        return 0.0
    kind = torch.complex128 if a.is_complex() else torch.float64
    size = float(a.to(kind).norm()) + lent * math.sqrt(a.numel())
    return float((a.to(kind) - b.to(kind)).norm()) / max(size, torch.finfo(a.dtype).tiny)
