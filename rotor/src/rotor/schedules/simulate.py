"""The checker: replay a schedule on a chain and report every byte.

It knows what the four operations mean and nothing of the recurrence. A dictionary maps each held
value to its size; each operation adds and removes entries. The checker shares no arithmetic, table
or rounding with the solvers, so it can contradict them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rotor.errors import InvalidScheduleError
from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One operation of a schedule: its peak while it runs, and what is held afterwards."""

    op: Op
    peak_bytes: int
    after_bytes: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """What a schedule holds over time, above the chain's input."""

    rows: tuple[TimelineRow, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes held at any moment."""
        return max((row.peak_bytes for row in self.rows), default=0)

    @property
    def makespan_ms(self) -> float:
        """The time of all operations, one after the other."""
        return sum(row.time_ms for row in self.rows)


class _Replay:
    """The values that are held, by name: ("x", k), ("saved", k) or ("grad", k)."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.last = len(chain.stages) - 1
        self.held: dict[tuple[str, int], int] = {("x", 0): 0}
        self.option_of: dict[int, int] = {}
        self.output_made = False
        self.next_backward = self.last
        self.position = 0

    def fail(self, op: Op, reason: str) -> InvalidScheduleError:
        return InvalidScheduleError(
            f"op {self.position} of the schedule, {op}, cannot run: {reason}", self.position
        )

    def total(self) -> int:
        return sum(self.held.values())

    def require_input(self, op: Op) -> None:
        if ("x", op.stage) not in self.held and ("saved", op.stage - 1) not in self.held:
            raise self.fail(op, f"x[{op.stage}] is not held at that point.")

    def require_fresh_output(self, op: Op) -> None:
        if ("x", op.stage + 1) in self.held or ("saved", op.stage) in self.held:
            raise self.fail(op, f"x[{op.stage + 1}] is already held; drop it first.")
        if op.stage > self.next_backward:
            raise self.fail(op, "its backward has already run.")

    def step(self, op: Op) -> TimelineRow:
        if not 0 <= op.stage <= self.last:
            raise self.fail(op, f"the chain has stages 0 to {self.last}.")
        if self.output_made and self.next_backward == self.last:
            # The loss has run outside the chain, and the gradient of the output exists.
            self.held["grad", self.last + 1] = self.chain.stages[self.last].output_grad_bytes
        peak, time_ms = self.run(op)
        self.position += 1
        return TimelineRow(op, peak, self.total(), time_ms)

    def run(self, op: Op) -> tuple[int, float]:
        match op:
            case ForwardNoGrad() | ForwardCheckpoint():
                return self.run_forward(op)
            case ForwardEnableGrad():
                return self.run_recording_forward(op)
            case Backward():
                return self.run_backward(op)

    def run_forward(self, op: ForwardNoGrad | ForwardCheckpoint) -> tuple[int, float]:
        self.require_input(op)
        self.require_fresh_output(op)
        stage = self.chain.stages[op.stage]
        peak = self.total() + stage.forward_peak_bytes
        self.held["x", op.stage + 1] = stage.output_bytes
        if isinstance(op, ForwardNoGrad) and self.held.pop(("x", op.stage), None) is None:
            raise self.fail(op, f"x[{op.stage}] belongs to a saved stage and cannot be forgotten.")
        self.output_made |= op.stage == self.last
        return peak, stage.forward_time_ms

    def run_recording_forward(self, op: ForwardEnableGrad) -> tuple[int, float]:
        self.require_input(op)
        self.require_fresh_output(op)
        options = self.chain.stages[op.stage].options
        if not 0 <= op.option < len(options):
            raise self.fail(op, f"the stage has options 0 to {len(options) - 1}.")
        option = options[op.option]
        peak = self.total() + option.saved_bytes + option.fwd_overhead_bytes
        self.held["saved", op.stage] = option.saved_bytes
        self.option_of[op.stage] = op.option
        if op.forget_input and self.held.pop(("x", op.stage), None) is None:
            raise self.fail(op, f"x[{op.stage}] belongs to a saved stage and cannot be forgotten.")
        self.output_made |= op.stage == self.last
        return peak, option.fwd_time_ms + (option.forget_time_ms if op.forget_input else 0.0)

    def run_backward(self, op: Backward) -> tuple[int, float]:
        if op.stage != self.next_backward:
            raise self.fail(op, f"the next backward is that of stage {self.next_backward}.")
        if ("saved", op.stage) not in self.held or self.option_of[op.stage] != op.option:
            raise self.fail(op, f"option {op.option} of the stage has not been saved.")
        self.require_input(op)
        option = self.chain.stages[op.stage].options[op.option]
        peak = self.total() + option.bwd_overhead_bytes
        del self.held["saved", op.stage]
        del self.held["grad", op.stage + 1]
        self.held.pop(("x", op.stage), None)
        self.held.pop(("x", op.stage + 1), None)
        if op.stage > 0:
            self.held["grad", op.stage] = self.chain.stages[op.stage - 1].output_grad_bytes
        self.next_backward -= 1
        return peak, option.bwd_time_ms


def simulate(chain: Chain, schedule_ops: Iterable[Op]) -> MemoryTimeline:
    """Return what the operations hold over time, or say which one breaks a rule.

    The gradient of the chain's output exists from the end of the first forward on.

    Raises:
        InvalidScheduleError: an op lacks a value it reads, makes one that is still held, or comes
            out of order; a stage's backward never runs; or a value is still held at the end.
    """
    replay = _Replay(chain)
    rows = tuple(replay.step(op) for op in schedule_ops)
    if replay.next_backward >= 0:
        raise InvalidScheduleError(
            f"the schedule ends before the backward of stage {replay.next_backward}.",
            replay.position,
        )
    if replay.held:
        left = ", ".join(f"{kind}[{index}]" for kind, index in replay.held)
        raise InvalidScheduleError(
            f"the schedule still holds {left} when it ends.", replay.position
        )
    return MemoryTimeline(rows)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations that compute every gradient of a chain, and their simulated time and peak."""

    ops: tuple[Op, ...]
    makespan_ms: float
    peak_bytes: int
    method: str = "dynamic program"

    @classmethod
    def from_ops(cls, chain: Chain, ops: Iterable[Op], method: str) -> Schedule:
        """Return the schedule of `ops`, checked and costed by the simulator."""
        sequence = tuple(ops)
        timeline = simulate(chain, sequence)
        return cls(sequence, timeline.makespan_ms, timeline.peak_bytes, method)

    def timeline(self, chain: Chain) -> MemoryTimeline:
        """Return what the schedule holds over time on `chain`."""
        return simulate(chain, self.ops)

    @property
    def forward_count(self) -> int:
        """The number of forward operations; without recomputation, one per stage."""
        return sum(not isinstance(op, Backward) for op in self.ops)

    def __str__(self) -> str:
        return " ".join(str(op) for op in self.ops)
