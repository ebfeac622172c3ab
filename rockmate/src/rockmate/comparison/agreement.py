"""Compares a planned step with eager PyTorch as strictly as two eager steps agree.

Some kernels add with atomics, in an order that differs from run to run (attention's backward on
CUDA, `index_add`, ...), some of them rarely. If bits differ, both steps are run again where kernels
repeat their results, and bits must be equal there. If they are not, and two eager steps differ,
too, results that never differed must still be equal. Gradients may differ by eager's noise, because
noise in one gradient reaches all later ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.elements import same_bits
from rockmate.comparison.eager import GRADIENT, Keep, StepResult, differences, named_results
from rockmate.comparison.repeating import Watching, repeating
from rockmate.comparison.values import Values, norm
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
    apart: Mapping[str, float]  # the largest distance, for every result that was looked at
    worst: float  # the largest, relative to the norm of its result

    @classmethod
    def around(cls, first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Noise:
        """Gather the distances of other steps from a first one, whose values are known."""
        apart = {key: max(other[key] for other in others) for key in first}
        worst = max((far / max(norm(first[key]), 1e-30) for key, far in apart.items()), default=0.0)
        return cls(1 + len(others), apart, worst)


def agree(
    eager: StepResult,
    ours: StepResult,
    run_eager: Callable[[Keep], StepResult],
    run_ours: Callable[[Keep], StepResult],
    name: str,
    suspects: Mapping[Any, str] = {},
    coarsest: torch.dtype = torch.float64,
) -> str:
    """Compare our step with eager's, as closely as eager steps agree; return the finding.

    It is called where fingerprints of `eager` and `ours` differ. Values are compared of what
    differs alone. `suspects` are operations whose results are known to differ from call to call, in
    words; `coarsest` is the least precise type of the step's values.

    Raises:
        SelfTestError: ours differs by more than eager does.
    """
    prints, given = named_results(eager), named_results(ours)
    if _is_other_watched(prints, run_eager):
        found = "Eager has other bits where a mode watches its operations, as a recording does"
        refuse(differences(eager, ours), name, found)
    if found := _repeated(eager, ours, run_eager, run_ours, suspects, coarsest):
        return found
    noisy = set[str]()
    for _ in range(EAGER_RUNS - 1):
        noisy |= _unlike(prints, named_results(run_eager("fingerprints")))
    if not noisy:
        refuse(differences(eager, ours), name)
        return "eager is deterministic here, and the planned step equals it"
    wrong = [] if eager.stream.equals(ours.stream) else ["the random stream after the step"]
    differing = _unlike(prints, given)
    wrong += [k for k in prints if k in differing - noisy and not k.startswith(GRADIENT)]
    looked_at = noisy | {key for key in differing if key.startswith(GRADIENT)}
    first = _of(run_eager(Values(looked_at)), looked_at)
    compared = Values(looked_at, first)
    others = [_of(run_eager(compared), looked_at) for _ in range(EAGER_RUNS - 1)]
    noise = Noise.around(first, others)
    if noise.worst > _MOST_NOISE:
        refuse(sorted(noisy), name, "They differ between two eager steps already")
    within = 0.0
    for key, apart in _of(run_ours(compared), looked_at).items():
        allowed = _NOISE_FACTOR * noise.apart[key] + _rounding(first[key])
        size = max(norm(first[key]), 1e-30)
        within = max(within, allowed / size)
        if not apart <= allowed:
            wrong.append(f"{key} (by {apart / size:.1e} of its norm)")
    gradients = sum(key.startswith(GRADIENT) for key in noisy)
    text = (
        f"eager is not deterministic here ({gradients} of {len(eager.gradients)} gradients differ "
        f"between {noise.runs} eager steps, by up to {noise.worst:.1e} of their norm"
        + "".join(f"; first of all {first}" for first in [*suspects.values()][:1])
        + f"): compared within {within:.1e}"
    )
    refuse(wrong, name, text)
    return text


def _is_other_watched(prints: Mapping[str, Any], run_eager: Callable[[Keep], StepResult]) -> bool:
    """Return whether eager repeats its bits, but has others, which it repeats, under a mode.

    Some functions of torch ask whether a mode is there, and then compute otherwise. So bits that
    are equal under a mode prove nothing for them.
    """

    def repeats(prints: Mapping[str, Any]) -> bool:
        return not _unlike(prints, named_results(run_eager("fingerprints")))

    if not repeats(prints):
        return False
    with Watching():
        watched = named_results(run_eager("fingerprints"))
        return bool(_unlike(prints, watched)) and repeats(watched)


def _repeated(
    eager: StepResult,
    ours: StepResult,
    run_eager: Callable[[Keep], StepResult],
    run_ours: Callable[[Keep], StepResult],
    suspects: Collection[Any],
    coarsest: torch.dtype,
) -> str:
    """Return the finding if bits are equal where kernels repeat, and values up to rounding else."""
    with repeating(suspects):
        if differences(run_eager("fingerprints"), run_ours("fingerprints")):
            return ""
    differing = _unlike(named_results(eager), named_results(ours))
    first = _of(run_eager(Values(differing)), differing)
    bound, worst = math.sqrt(_ROUNDINGS * torch.finfo(coarsest).eps), 0.0
    for key, apart in _of(run_ours(Values(differing, first)), differing).items():
        worst = max(worst, apart / max(norm(first[key]), 1e-30))
    if not (worst <= bound and eager.stream.equals(ours.stream)):
        return ""
    return (
        "some kernels add in another order from call to call, or in another thread. Where they "
        "repeat their results, the planned step equals eager's bit by bit, and without that within "
        f"{worst:.1e}"
    )


def _unlike(some: Mapping[str, Any], others: Mapping[str, Any]) -> set[str]:
    return {key for key, value in some.items() if not same_bits(value, others.get(key))}


def _of(step: StepResult, names: Collection[str]) -> dict[str, Any]:
    """Return these results of a step, in its order; a missing one is infinitely far off."""
    found = named_results(step)
    return {key: math.inf if found[key] is None else found[key] for key in found if key in names}


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


def _rounding(value: Any) -> float:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return _ROUNDINGS * torch.finfo(value.dtype).eps * norm(value)
