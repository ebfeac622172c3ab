"""From a plan to the explicit list of instructions that the executor runs.

The executor decides nothing: which forwards record, what is freed when, and for how long the state
for re-running a node is kept all stand in the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rockmate.liveness import check_order, live_after, recording_steps
from rockmate.plan import Plan
from rockmate.problem import Problem
from rockmate.steps import Step


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of the program.

    `frees` are the storages to drop once the step has run, those that it made itself and nobody
    reads included. The phantoms of a forward that does not record are never made, so never freed;
    those of a backward are freed after it. An output that a node makes once more is not freed: it
    is the new copy that must be dropped at once.
    """

    kind: Literal["F", "B"]
    node: int
    record: bool = False  # this forward records an autograd graph
    frees: tuple[int, ...] = ()
    is_rerun: bool = False  # not the first forward of its node
    saves_state: bool = False  # first forward of a node that will run again: keep its rerun state
    frees_state: bool = False  # last forward of a node that ran more than once: drop that state


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions of one step: the forward phase, then the backward phase."""

    instructions: tuple[Instruction, ...]
    forward_length: int  # the first so many instructions are the forward phase

    @property
    def forward_phase(self) -> tuple[Instruction, ...]:
        """Each node's first forward, in order."""
        return self.instructions[: self.forward_length]

    @property
    def backward_phase(self) -> tuple[Instruction, ...]:
        """Recomputations and backward steps."""
        return self.instructions[self.forward_length :]


def lower(problem: Problem, plan: Plan | Sequence[Step]) -> Program:
    """Return the program of a plan (or of bare steps, for tests and calibration runs).

    Raises:
        InvalidPlanError: the steps are out of order.
    """
    steps = plan.steps if isinstance(plan, Plan) else tuple(plan)
    check_order(problem, steps)
    after = live_after(problem, steps)
    records = recording_steps(problem, steps, after)
    first = len(problem.nodes)
    last_forward = {node: t for t, (kind, node) in enumerate(steps) if kind == "F"}
    instructions = []
    alive = 0
    for t, (kind, node) in enumerate(steps):
        if kind == "F":
            made = problem.product_masks[node]
            alive |= made if records[t] else made & ~problem.phantom_masks[node]
        frees = alive & ~after[t]
        alive &= after[t]
        runs_again = kind == "F" and last_forward[node] >= first
        instructions.append(
            Instruction(
                kind=kind,
                node=node,
                record=records[t],
                frees=_members(frees),
                is_rerun=kind == "F" and t >= first,
                saves_state=runs_again and t < first,
                frees_state=runs_again and last_forward[node] == t,
            )
        )
    return Program(tuple(instructions), first)


def _members(mask: int) -> tuple[int, ...]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
