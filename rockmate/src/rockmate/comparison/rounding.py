"""Compares a compiled step with an eager one, up to rounding.

Compiled kernels add in another order and keep more digits in between. A wrong kernel, or one that
reads its input in the wrong order, is wrong by as much as the values themselves. The bound used
here is the square root of the precision, which lies in between. A gradient that consists only of
rounding (of a bias before a norm) has no scale: it may differ by some roundings of the largest
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements import TensorInfo, same_bits
from rockmate.comparison.agreement import refuse
from rockmate.comparison.eager import GRADIENT, StepResult, named_results

_ROUNDINGS = 16.0  # that a sum may accumulate; a ReLU near 0 may then change its gradients
_TIMES_NUDGED = 4.0
_MOST_APART = 0.5


def coarsest_type(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Return the least precise floating-point type among values."""
    kinds = {info.dtype for info in infos if info.dtype.is_floating_point}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)


def nudge(module: nn.Module) -> nn.Module:
    """Replace a module's weights by copies, some of them changed by a few roundings."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        weight = parameter.detach()
        if weight.is_floating_point():
            steps = torch.randint(-1, 2, weight.shape, generator=generator, device="cpu")
            few = _ROUNDINGS * torch.finfo(weight.dtype).eps
            rounding = few * steps.to(weight.device, weight.dtype)
            parameter.data = weight + weight * rounding
    return module


def compare_rounded(
    eager: StepResult,
    ours: StepResult,
    name: str,
    kind: torch.dtype,
    nudged: Callable[[], StepResult] | None = None,
) -> str:
    """Compare two steps up to rounding in `kind`, and return their distance in words.

    `nudged` runs an eager step with weights that are changed by a few roundings. The random state,
    and all results that are not floating-point, must be equal.

    Raises:
        SelfTestError: a difference is larger.
    """
    bound = math.sqrt(torch.finfo(kind).eps)
    apart, wrong = _distances(eager, ours, kind)
    if not eager.stream.equals(ours.stream):
        wrong.append("the random stream after the step")
    bounds = dict.fromkeys(apart, bound)
    far = [key for key, distance in apart.items() if not distance <= bound]  # also for NaN
    if far and nudged is not None:
        moved, _ = _distances(eager, nudged(), kind)
        for key in far:
            bounds[key] = max(bound, min(_MOST_APART, _TIMES_NUDGED * moved.get(key, 0.0)))
    wrong += [f"{k} (by {apart[k]:.1e} of its size)" for k in far if not apart[k] <= bounds[k]]
    refuse(wrong, name, "Compiled pieces are held to eager's values up to rounding")
    where = max(apart, key=lambda key: apart[key], default="")
    allowed = f"up to {bounds.get(where, bound):.1e} is rounding"
    if far:
        allowed += ", as eager shows with weights moved by roundings"
    return f"within {apart.get(where, 0.0):.1e} of eager ({where}; {allowed})"


def _distances(
    eager: StepResult, ours: StepResult, kind: torch.dtype
) -> tuple[dict[str, float], list[str]]:
    """Return relative distances of floating-point results, and the names of other differences."""
    theirs: Mapping[str, Any] = named_results(eager)
    given: Mapping[str, Any] = named_results(ours)
    eps = torch.finfo(kind).eps
    wrong = [] if len(eager.outputs) == len(ours.outputs) else ["the number of outputs"]
    largest = max((_mean_size(v) for n, v in theirs.items() if n.startswith(GRADIENT)), default=0.0)
    apart: dict[str, float] = {}
    for key, value in theirs.items():
        found = given.get(key)
        if found is None or not _are_floating(value, found):
            wrong += [] if same_bits(value, found) else [key]
            continue
        lent = _ROUNDINGS * math.sqrt(eps) * largest if key.startswith(GRADIENT) else 0.0
        apart[key] = _apart(value, found, lent)
    return apart, wrong


def _are_floating(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and (a.is_floating_point() or a.is_complex())
    )


def _mean_size(value: Any) -> float:
    """Return the root mean square of the elements; 0 if there are none."""
    if not isinstance(value, Tensor) or not value.numel() or not value.is_floating_point():
        return 0.0
    return float(value.double().square().mean().sqrt())


def _apart(a: Tensor, b: Tensor, lent: float) -> float:
    """Return the distance of two results relative to the first."""
    if not a.numel() or same_bits(a, b):
        return 0.0
    kind = torch.complex128 if a.is_complex() else torch.float64
    size = float(a.to(kind).norm()) + lent * math.sqrt(a.numel())
    return float((a.to(kind) - b.to(kind)).norm()) / max(size, torch.finfo(a.dtype).tiny)
