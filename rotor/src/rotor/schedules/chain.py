"""The problem: a chain of stages, each of which can be run in one or more ways.

Stage `k` reads `x[k]` and writes `x[k+1]`. The chain's input `x[0]` belongs to the caller and is
not counted. Every byte count is exact; only the solver rounds to slots.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rotor.errors import InvalidChainError

_MOST_BYTES = 1 << 53  # limit of the sum of a chain's sizes, so that no partial sum overflows


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage: what it keeps until its backward, and at what cost."""

    saved_bytes: int  # kept from forward to backward, stage output included
    fwd_time_ms: float
    bwd_time_ms: float  # includes recomputation inside the stage
    fwd_overhead_bytes: int  # peak during forward, above input + saved
    bwd_overhead_bytes: int  # peak during backward, above input + saved + output gradient
    key: Hashable = None  # the caller's handle; the solver never looks at it
    forget_time_ms: float = 0.0  # extra time of the forward that forgets its input (Fe*)

    def __post_init__(self) -> None:
        _require_bytes(
            "option",
            saved_bytes=self.saved_bytes,
            fwd_overhead_bytes=self.fwd_overhead_bytes,
            bwd_overhead_bytes=self.bwd_overhead_bytes,
        )
        _require_times(
            "option",
            fwd_time_ms=self.fwd_time_ms,
            bwd_time_ms=self.bwd_time_ms,
            forget_time_ms=self.forget_time_ms,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the chain: its options, its boundary sizes, and its forward without recording."""

    name: str
    options: tuple[Option, ...]  # at least one
    output_bytes: int  # of x[k+1]
    output_grad_bytes: int  # gradient bytes alive just before this stage's backward starts
    forward_time_ms: float  # forward that keeps nothing but the output (Fn, Fc)
    forward_peak_bytes: int  # its peak above its input, output included

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        if not self.options:
            raise InvalidChainError(f"{where} has no option. Give it at least one way to run.")
        _require_bytes(
            where,
            output_bytes=self.output_bytes,
            output_grad_bytes=self.output_grad_bytes,
            forward_peak_bytes=self.forward_peak_bytes,
        )
        _require_times(where, forward_time_ms=self.forward_time_ms)


@dataclass(frozen=True)
class Chain:
    """Stages in forward order. The chain's own input is resident: held, not counted."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise InvalidChainError("a chain needs at least one stage, and has none.")
        total = sum(map(_total_bytes, self.stages))
        if total > _MOST_BYTES:
            raise InvalidChainError(
                f"the sizes of this chain add up to {total} bytes; the solvers count up to "
                f"{_MOST_BYTES} (2^53). Give sizes in bytes, as a device can have."
            )

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def fastest_options(self) -> tuple[int, ...]:
        """For each stage the option of least time; among equals the one that keeps least."""
        return tuple(
            min(
                range(len(stage.options)),
                key=lambda o: (
                    stage.options[o].fwd_time_ms + stage.options[o].bwd_time_ms,
                    stage.options[o].saved_bytes,
                ),
            )
            for stage in self.stages
        )


def _total_bytes(stage: Stage) -> int:
    own = stage.output_bytes + stage.output_grad_bytes + stage.forward_peak_bytes
    return own + sum(
        option.saved_bytes + option.fwd_overhead_bytes + option.bwd_overhead_bytes
        for option in stage.options
    )


def _require_bytes(where: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 0 or count != int(count):
            raise InvalidChainError(f"{where}: {name} is {count!r}; give a whole number >= 0.")


def _require_times(where: str, **times: float) -> None:
    for name, time in times.items():
        if not 0 <= time < float("inf"):
            raise InvalidChainError(f"{where}: {name} is {time!r}; give a finite number >= 0.")
