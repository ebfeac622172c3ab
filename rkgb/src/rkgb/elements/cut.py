"""Where a backward passes the gradient of an output to autograd, part by part, and gets it back.

An output may be used by other outputs, as a hidden state beside the result is. Its gradient then
belongs to autograd, which adds gradients from outside and runs hooks. In a graph, `GradientPart`
adds a part to the value that autograd holds, and `GradientCut` takes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rkgb.elements.op import Op
from rkgb.elements.target import OpCost, Target


@dataclass(frozen=True)
class ThroughAutograd(Target):
    """What a backward passes to autograd, or takes from it, of the gradient of an output."""

    root: str  # the output
    from_outside: bool

    def cost(self, op: Op) -> OpCost:
        return OpCost(0.0)


class GradientPart(ThroughAutograd):
    """Passes a part of an output's gradient to autograd.

    It comes `from_outside` if it is the first part and is added to a gradient from outside.
    """

    __name__ = "part"

    def __call__(self, *parts: Tensor) -> Tensor:
        """Return what autograd then holds: the part, added to the sum so far if there is one."""
        return parts[0] + parts[1] if len(parts) > 1 else parts[0]


class GradientCut(ThroughAutograd):
    """Takes the whole gradient of an output from autograd.

    It comes `from_outside` if autograd also holds one from outside, from the beginning on.
    """

    __name__ = "cut"

    def __call__(self, held: Tensor) -> Tensor:
        """Return the gradient as it is, the case in which no hook changes it."""
        return held
