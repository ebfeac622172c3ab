"""The recurrence of rotor in readable Python: the specification of the compiled one.

Problem. Given a chain of stages a..b, with x[a] held by the caller and `m` bytes for the rest, find
the fastest sequence of Fn, Fc, Fe and B that runs every backward. Whatever Fc or Fe stores is kept
until its own backward ("memory persistent" schedules).

Recurrence (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: *Optimal memory-aware backpropagation
of deep join networks*, 2020, and *Optimal checkpointing for heterogeneous chains*, 2019;
hal-02352969), with several options per stage:

    Opt(a, b, m) = min of
      (1) over options o of a:
            fwd(a,o) + bwd(a,o) + Opt(a+1, b, m - saved(a,o))
            if m >= saved(a,o) + fwd_overhead(a,o) + grad_held(b)
            and m >= saved(a,o) + output_grad(a) + bwd_overhead(a,o)
      (2) over j in a+1..b, storing x[j]:
            forward(a) + .. + forward(j-1) + Opt(j, b, m - output(j-1)) + Opt(a, j-1, m)
            if m >= grad_held(b) + max over k in a..j-1 of ([k > a] output(k-1) + forward_peak(k))
    Opt(b+1, b, m) = 0 for m >= 0

grad_held(b) is the gradient of the output of stage b, alive until B(b) starts to consume it. For
the last stage of the chain it is 0: every forward of Opt(a, last, m) belongs to the very first
forward, when no gradient exists. (Published versions count it; leaving it out makes the recurrence
agree with the simulator to the byte.)

Memory is in slots of `unit` bytes. Each *sum* above is formed in bytes and rounded up once; a
budget is rounded down: `s` free slots mean at least `s * unit` free bytes, always.

Two tables: the makespans, and the smallest feasible memory of each (a, b), which does not depend
on m. With unit = 1 the latter is the exact smallest budget, in O(n³) and no table over m.

Time O(n² · (n + options) · slots), memory O(n² · slots). Not handled: dropping a stored value
before its backward (see `rotor.solver.intervals`), and keeping a stage's output without its saved
tensors once its own backward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the minimum: store x[split], or run stage a with grad, using `option`."""

    threshold: int  # slots below which the step itself does not fit
    held: int  # slots taken from the part of the chain that runs next
    time_ms: float
    split: int | None = None
    option: int | None = None


class ReferenceTable:
    """Opt(a, b, m) for every a <= b and 0 <= m <= `slots`, and the schedules behind it."""

    def __init__(self, chain: Chain, unit_bytes: int, slots: int) -> None:
        self.chain = chain
        self.unit = unit_bytes
        self.slots = slots
        count = len(chain)
        self.opt: dict[tuple[int, int], list[float]] = {}
        self.floor: dict[tuple[int, int], int] = {}  # smallest feasible m
        self.tight_ms: dict[tuple[int, int], float] = {}  # makespan of one schedule at the floor
        for a in reversed(range(count)):
            for b in range(a, count):
                self._fill(a, b)

    def _round_up(self, count_bytes: int) -> int:
        return -(-count_bytes // self.unit)

    def choices(self, a: int, b: int) -> Iterator[Choice]:
        """Yield every way to begin Opt(a, b, ·), in a fixed order: options, then splits."""
        stages = self.chain.stages
        held_grad = stages[b].output_grad_bytes if b < len(stages) - 1 else 0
        for index, option in enumerate(stages[a].options):
            forward = option.saved_bytes + option.fwd_overhead_bytes + held_grad
            backward = option.saved_bytes + stages[a].output_grad_bytes + option.bwd_overhead_bytes
            yield Choice(
                threshold=self._round_up(max(forward, backward)),
                held=self._round_up(option.saved_bytes),
                time_ms=option.fwd_time_ms + option.bwd_time_ms,
                option=index,
            )
        peak = 0
        time_ms = 0.0
        for j in range(a + 1, b + 1):
            k = j - 1
            input_bytes = stages[k - 1].output_bytes if k > a else 0
            peak = max(peak, input_bytes + stages[k].forward_peak_bytes)
            time_ms += stages[k].forward_time_ms
            yield Choice(
                threshold=self._round_up(peak + held_grad),
                held=self._round_up(stages[k].output_bytes),
                time_ms=time_ms,
                split=j,
            )

    def _parts(self, a: int, b: int, choice: Choice) -> list[tuple[int, int, int]]:
        """Return the subproblems of a choice as (a, b, slots less), in the order they run."""
        if choice.split is not None:
            return [(choice.split, b, choice.held), (a, choice.split - 1, 0)]
        return [(a + 1, b, choice.held)] if a < b else []

    def _fill(self, a: int, b: int) -> None:
        row = [INFINITY] * (self.slots + 1)
        ways = []
        for choice in self.choices(a, b):
            parts = self._parts(a, b, choice)
            least = max([choice.threshold, *(held + self.floor[i, j] for i, j, held in parts)])
            tight = choice.time_ms + sum(self.tight_ms[i, j] for i, j, _ in parts)
            ways.append((least, tight))
            for m in range(least, self.slots + 1):
                rest = sum(self.opt[i, j][m - held] for i, j, held in parts)
                row[m] = min(row[m], choice.time_ms + rest)
        self.opt[a, b] = row
        self.floor[a, b], self.tight_ms[a, b] = min(ways)

    @property
    def smallest_slot(self) -> int:
        """The smallest feasible m for the whole chain; it may lie above the table."""
        return self.floor[0, len(self.chain) - 1]

    def makespan(self, m: int) -> float:
        """Opt(0, last, m) in milliseconds, infinite if infeasible."""
        return self.opt[0, len(self.chain) - 1][m]

    def ops(self, m: int) -> list[Op]:
        """Return a schedule that attains `makespan(m)`, by evaluating the minima again."""
        return self._walk(m, lambda i, j, free: self.opt[i, j][free])

    def tight_ops(self, m: int) -> list[Op]:
        """Return some schedule for any m >= `smallest_slot`, also above the table.

        For the rest of each choice it assumes the fastest schedule in the least memory.
        """
        return self._walk(m, lambda i, j, free: self.tight_ms[i, j])

    def _walk(self, m: int, cost: Callable[[int, int, int], float]) -> list[Op]:
        ops: list[Op] = []
        todo: list[Op | tuple[int, int, int]] = [(0, len(self.chain) - 1, m)]
        while todo:
            item = todo.pop()
            if not isinstance(item, tuple):
                ops.append(item)
                continue
            a, b, free = item
            best = self._best_choice(a, b, free, cost)
            parts = [(i, j, free - held) for i, j, held in self._parts(a, b, best)]
            if best.split is not None:
                ops.append(ForwardCheckpoint(a))
                ops.extend(ForwardNoGrad(k) for k in range(a + 1, best.split))
                todo.extend(reversed(parts))
            else:
                assert best.option is not None
                ops.append(ForwardEnableGrad(a, best.option))
                todo.append(Backward(a, best.option))
                todo.extend(parts)
        return ops

    def _best_choice(
        self, a: int, b: int, free: int, cost: Callable[[int, int, int], float]
    ) -> Choice:
        best: Choice | None = None
        best_ms = INFINITY
        for choice in self.choices(a, b):
            parts = self._parts(a, b, choice)
            fits = all(free - held >= self.floor[i, j] for i, j, held in parts)
            if free < choice.threshold or not fits:
                continue
            time_ms = choice.time_ms + sum(cost(i, j, free - held) for i, j, held in parts)
            if time_ms < best_ms:
                best, best_ms = choice, time_ms
        assert best is not None, "called below the smallest feasible memory"
        return best
