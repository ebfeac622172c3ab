"""Times each operation of a schedule on each stage: the minimum over several rounds.

A round visits all stages, so other stages run between two runs of one stage, as in a training step.
A disturbance only makes a run longer, and two rounds are rarely disturbed at the same stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from rotor.errors import StageError
from rotor.runtime.boundary import Layout, Tensors, is_differentiable, pack, unpack
from rotor.runtime.execute import RecomputedInputs, run_program
from rotor.runtime.gradients import stage_gradients
from rotor.runtime.joining import call_stage
from rotor.runtime.program import Program, RunStage
from rotor.runtime.stages import CodeStage
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Runs a call and returns how long it took, in milliseconds."""

MIN_ROUNDS = 3
MAX_ROUNDS = 8
TOLERANCE = 0.02  # rounds end once the best and second-best times, summed, differ by no more
PATIENCE_MS = 2000.0  # no round begins after this: long runs are disturbed little


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Milliseconds of one stage in one round."""

    first: float  # forward without recording, when the parameters are not in the cache
    forward: float  # the same, immediately afterwards
    record: float
    backward: float
    again: float  # forward, recomputation and backward by the executor
    emptied: float  # a recorded forward that forgets its input, and its backward

    @property
    def total(self) -> float:
        """The sum of all."""
        forwards = self.first + self.forward + self.record
        return forwards + self.backward + self.again + self.emptied


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Milliseconds of the operations of a schedule on one stage."""

    forward: float  # Fn, Fc
    record: float  # Fe
    backward: float
    forget: float  # of Fe* above Fe

    @classmethod
    def of(cls, rounds: Sequence[StageTimes], *, always_record: bool) -> OpTimes:
        """Return the times of one stage from its rounds."""
        record = min(times.record for times in rounds)
        backward = min(times.backward for times in rounds)
        forward_warm = min(times.forward for times in rounds)
        forward = max(forward_warm, record) if always_record else forward_warm
        # A recomputed stage is a Function with a graph of its own. For a small stage this is a
        # good part of the time, and recomputation has to pay for it.
        apart = max(0.0, min(times.again for times in rounds) - forward - record - backward)
        hooks = max(0.0, min(times.emptied for times in rounds) - record - backward)
        # In a step other stages run in between, so a forward has to fetch its parameters.
        fetch = max(0.0, min(times.first for times in rounds) - forward_warm)
        return cls(forward + apart + fetch, record + fetch, backward, hooks + apart)


def in_rounds(visit_all: Callable[[], Sequence[StageTimes]]) -> list[Sequence[StageTimes]]:
    """Return the times of several rounds; stop once best and second-best times nearly agree."""
    rounds: list[Sequence[StageTimes]] = []
    spent_ms = 0.0
    while len(rounds) < MAX_ROUNDS and spent_ms <= PATIENCE_MS:
        rounds.append(visit_all())
        spent_ms += sum(times.total for times in rounds[-1])
        if len(rounds) >= MIN_ROUNDS:
            stages = [sorted(times.total for times in of) for of in zip(*rounds, strict=True)]
            least = sum(stage[0] for stage in stages)
            if sum(stage[1] for stage in stages) <= least * (1 + TOLERANCE):
                break
    return rounds


def time_stage(
    clock: Timer,
    stage: RunStage,
    inputs: Tensors,
    layout: Layout,
    device: torch.device,
    *,
    preserve_rng: bool,
    accumulates: bool,
    gives_gradients: bool,
) -> StageTimes:
    """Time a stage in every form that a schedule may ask for.

    With `accumulates`, gradients are added to those of the stage's present parameters, as in a
    step. Otherwise they are returned and discarded, which takes longer: all are alive together.
    The inputs get gradients if the stage `gives_gradients`.
    """

    def beginning() -> Tensors:
        return as_leaves(inputs) if gives_gradients else tuple(t.detach() for t in inputs)

    code, end = stage.code, Accumulation if accumulates else StageBackward
    results: list[tuple[Tensors, Layout]] = []

    def forward() -> None:
        results[:] = [call_stage(code, inputs, layout, recording=False)]

    first_ms, forward_ms = clock(forward), clock(forward)
    results.clear()
    leaves = beginning()
    record_ms = clock(lambda: results.append(call_stage(code, leaves, layout, recording=True)))
    backward = end(code, leaves, results.pop()[0])
    backward_ms = clock(backward)

    program = Program.build(
        (stage,), (ForwardCheckpoint(0), ForwardEnableGrad(0), Backward(0)), (device,), preserve_rng
    )
    for leaf in leaves:
        leaf.grad = None

    def run_again() -> None:
        outputs, _ = pack(run_program(program, unpack(leaves, layout)))
        backward.start_from(outputs)
        del outputs
        backward()

    again_ms = clock(run_again)
    leaves = beginning()
    source = RecomputedInputs(leaves)

    def record_emptied() -> None:
        with saved_tensors_hooks(source.pack, source.unpack):
            results.append(call_stage(code, leaves, layout, recording=True))

    emptied_ms = clock(record_emptied)
    source.now = leaves
    emptied_ms += clock(end(code, leaves, results.pop()[0]))
    return StageTimes(first_ms, forward_ms, record_ms, backward_ms, again_ms, emptied_ms)


def untimed(call: Callable[[], object]) -> float:
    """Run a call; return 0. A `Timer` for warming up."""
    call()
    return 0.0


def as_leaves(inputs: Tensors) -> Tensors:
    """Return the same values as leaves of a new graph."""
    # Integers cannot require gradients, which would protect them from writes; they are copied.
    return tuple(t.detach().requires_grad_() if is_differentiable(t) else t.clone() for t in inputs)


class StageBackward:
    """The recorded graph of one run of a stage, and the call that runs its backward."""

    def __init__(self, code: CodeStage, leaves: Tensors, outputs: Tensors) -> None:
        self.code = code
        self.leaves = leaves
        self.ones = [torch.ones_like(t) if is_differentiable(t) else None for t in outputs]
        self.wanted = [t for t in (*leaves, *code.parameters()) if t.requires_grad]
        self.start_from(outputs)

    def start_from(self, outputs: Tensors) -> None:
        """Start the next backward from these outputs; another run may have made them."""
        self.edges = [get_gradient_edge(t) for t in outputs if t.requires_grad]
        self.grads = [
            g for t, g in zip(outputs, self.ones, strict=True) if g is not None and t.requires_grad
        ]

    def __call__(self) -> tuple[torch.Tensor | None, ...]:
        if not self.edges or not self.wanted:
            return ()
        try:
            return self.run()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise StageError(
                f"stage {self.code.name} overwrites a tensor that its own backward needs, and "
                f"plain PyTorch fails in the same way: {error}. Use inplace=False in it.",
                self.code.name,
            ) from error

    def run(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs and parameters that require them."""
        return stage_gradients(self.edges, self.wanted, self.grads)


class Accumulation(StageBackward):
    """A backward that accumulates into the leaves, as a training step does."""

    def run(self) -> tuple[torch.Tensor | None, ...]:
        """Add to the gradients of the leaves, and return none."""
        torch.autograd.backward(self.edges, self.grads, inputs=self.wanted)
        return ()
