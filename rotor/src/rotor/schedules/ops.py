"""The four operations of a schedule, with the names of the paper: Fn, Fc, Fe and B.

A schedule is a sequence of these and nothing else. `x[k]` is the input of stage `k`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ForwardNoGrad:
    """Run a stage without recording and forget its input.

    `ForwardNoGrad(3)` is read as: compute `x[4]` from `x[3]`, then drop `x[3]`.
    """

    stage: int

    def __str__(self) -> str:
        return f"Fn({self.stage})"


@dataclass(frozen=True, slots=True)
class ForwardCheckpoint:
    """Run a stage without recording and keep its input.

    `ForwardCheckpoint(3)` is read as: compute `x[4]` from `x[3]`, and hold `x[3]`.
    """

    stage: int

    def __str__(self) -> str:
        return f"Fc({self.stage})"


@dataclass(frozen=True, slots=True)
class ForwardEnableGrad:
    """Run a stage as one of its options says, keeping what its backward needs.

    `ForwardEnableGrad(3, 1)` is read as: compute `x[4]` from `x[3]` as option 1 of stage 3 says,
    hold `x[3]`, and hold what the option saves (`x[4]` is part of it). With `forget_input` it is
    `Fe*(3, 1)`: `x[3]` is dropped and has to be recomputed before `Backward(3, 1)`.
    """

    stage: int
    option: int = 0
    forget_input: bool = False

    def __str__(self) -> str:
        name = "Fe*" if self.forget_input else "Fe"
        return (
            f"{name}({self.stage})" if self.option == 0 else f"{name}({self.stage},{self.option})"
        )


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a stage and release what was kept for it.

    `Backward(3, 1)` is read as: from the gradient of `x[4]`, `x[3]` and what option 1 saved,
    compute the gradient of `x[3]`; then drop the saved values, `x[3]`, and the old gradient.
    """

    stage: int
    option: int = 0

    def __str__(self) -> str:
        return f"B({self.stage})" if self.option == 0 else f"B({self.stage},{self.option})"


Op: TypeAlias = ForwardNoGrad | ForwardCheckpoint | ForwardEnableGrad | Backward

# Short names, as the tutorial and the paper write them.
Fng = Fn = ForwardNoGrad
Fck = Fc = ForwardCheckpoint
Fe = ForwardEnableGrad
B = Backward
