"""Compares a planned step with eager PyTorch as strictly as two eager steps agree.

Some kernels add with atomics, in an order that differs from run to run (attention's backward on
CUDA, `index_add`, ...). If two eager steps from one random state agree, bits must be equal. If they
differ, results that never differed must still be equal. Gradients may differ by eager's noise,
because noise in one gradient reaches all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from rockmate.comparison.deterministic import why_bits_may_differ
from rockmate.comparison.eager import (
    GRADIENT,
    StepResult,
    differences,
    equal_values,
    named_results,
)
from rockmate.errors import SelfTestError

EAGER_RUNS = 3
# Two eager steps are only one sample of the noise; another step may differ more.
_NOISE_FACTOR = 8.0
_ROUNDINGS = 4.0


# A larger difference is no rounding: the module does something else at every call.
_MOST_NOISE = 0.1


@dataclass(frozen=True)
class Noise:
    """The differences between eager steps from one random state."""

    runs: int
    norms: dict[str, float]  # norm of the largest difference, for every result that differs
    worst: float  # the largest one, relative to the norm of its result

    def __bool__(self) -> bool:
        return bool(self.norms)

    @classmethod
    def between(cls, steps: Sequence[StepResult]) -> Noise:
        """Compare the steps pair by pair."""
        found: dict[str, float] = {}
        worst = 0.0
        for a, b in combinations(map(named_results, steps), 2):
            for name, value in a.items():
                apart = _distance(value, b[name])
                if apart > 0:
                    found[name] = max(found.get(name, 0.0), apart)
                    worst = max(worst, apart / max(_norm(value), 1e-30))
        return cls(len(steps), found, worst)


def agree(
    run_eager: Callable[[], StepResult],
    run_ours: Callable[[], StepResult],
    name: str,
    suspect: str = "",
) -> str:
    """Compare our step with eager's, as closely as eager steps agree; return the finding.

    It is called if a comparison bit by bit has failed. `suspect` is an operation that is known to
    be nondeterministic.

    Raises:
        SelfTestError: ours differs by more than eager does.
    """
    steps = [run_eager() for _ in range(EAGER_RUNS)]
    noise = Noise.between(steps)
    first, ours = steps[0], run_ours()
    if not noise:
        refuse(differences(first, ours), name, why_bits_may_differ())
        return "eager is deterministic here, and the planned step equals it"
    wrong = [] if first.stream.equals(ours.stream) else ["the random stream after the step"]
    if noise.worst > _MOST_NOISE:
        refuse(sorted(noise.norms), name, "They differ between two eager steps already")
    given, within = named_results(ours), 0.0
    for key, value in named_results(first).items():
        apart = _distance(value, given.get(key))
        is_noisy = key in noise.norms or key.startswith(GRADIENT)
        allowed = _NOISE_FACTOR * noise.norms.get(key, 0.0) + _rounding(value) if is_noisy else 0.0
        norm = max(_norm(value), 1e-30)
        within = max(within, allowed / norm)
        if not apart <= allowed:
            wrong.append(f"{key} (by {apart / norm:.1e} of its norm)")
    gradients = sum(key.startswith(GRADIENT) for key in noise.norms)
    text = (
        f"eager is not deterministic here ({gradients} of {len(first.gradients)} gradients differ "
        f"between {noise.runs} eager steps, by up to {noise.worst:.1e} of their norm"
        + (f"; first of all {suspect}" if suspect else "")
        + f"): compared within {within:.1e}"
    )
    refuse(wrong, name, text)
    return text


def refuse(wrong: Sequence[str], name: str, found: str = "") -> None:
    """Raise if something differs.

    Raises:
        SelfTestError: it names the first four.
    """
    if not wrong:
        return
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    raise SelfTestError(
        f"the planned {name} does not compute what eager PyTorch computes: "
        f"{', '.join(wrong[:4])}{more} differ. It must not be used; please report the module. "
        + (f"({found}.)" if found else "(Is its forward deterministic for equal inputs?)")
    )


def _distance(a: Any, b: Any) -> float:
    if equal_values(a, b):
        return 0.0
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return float("inf")
    return float(torch.linalg.vector_norm(_wide(a) - _wide(b)))


def _norm(value: Any) -> float:
    return float(torch.linalg.vector_norm(_wide(value))) if isinstance(value, Tensor) else 0.0


def _rounding(value: Any) -> float:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return _ROUNDINGS * torch.finfo(value.dtype).eps * _norm(value)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
