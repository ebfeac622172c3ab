"""The places in a backward where a gradient leaves for autograd, part by part, and comes back.

The user has a tensor that others were computed from: a hidden state beside the result. What flows
through it is autograd's until it has added what comes from outside, and has run hooks. In a graph
each part goes to a value that stands for what autograd holds, and the whole is made of the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Hands a part of an output's gradient to autograd."""

    root: str  # the output
    from_outside: bool  # whether one from there is expected to have come before, and this is next

    @property
    def __name__(self) -> str:
        return "part"

    def __call__(self, *parts: Tensor) -> Tensor:
        """Return what autograd then holds: the sum so far, if any, and the part."""
        return parts[0] + parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Cut:
    """Takes the whole gradient of an output from autograd."""

    root: str
    from_outside: bool  # whether a gradient is expected from there, which waits from the beginning

    @property
    def __name__(self) -> str:
        return "cut"

    def __call__(self, held: Tensor) -> Tensor:
        """Return what comes back where nothing changes it."""
        return held
