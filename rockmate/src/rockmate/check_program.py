"""A checker for programs: does every instruction find what it reads?

It follows sets of storages and recorded graphs through the instructions and knows nothing of how
frees and flags were derived. What it accepts, the executor can run; what it refuses, it cannot.
"""

from __future__ import annotations

from rockmate.errors import InvalidPlanError
from rockmate.problem import Problem
from rockmate.program import Instruction, Program


def check_program(problem: Problem, program: Program) -> None:
    """Check a program instruction by instruction.

    Raises:
        InvalidPlanError: an instruction reads what is not there, runs a node that has no graph or
            no kept state, or breaks the order of the backward; the text names it.
    """
    alive: set[int] = set()
    graphs: set[int] = set()
    states: set[int] = set()
    ran: set[int] = set()
    pending = list(problem.backward_order)
    forward = program.instructions[: program.forward_length]
    if [(i.kind, i.node) for i in forward] != [("F", k) for k in range(len(problem.nodes))]:
        raise InvalidPlanError("the forward phase does not run every node once, in order")
    for place, instruction in enumerate(program.instructions):
        node = instruction.node
        if instruction.kind == "F":
            _need(problem, place, instruction, problem.fwd_inputs[node], alive)
            if instruction.is_rerun != (node in ran):
                raise _refusal(place, instruction, "is marked wrongly as a first or later run")
            if node in ran and problem.nodes[node].rerun_state_bytes and node not in states:
                raise _refusal(place, instruction, "finds no state kept for running again")
            if instruction.saves_state:
                states.add(node)
            ran.add(node)
            made = set(problem.products[node])
            if instruction.record:
                graphs.add(node)
            else:
                made -= {s for s in made if problem.storages[s].is_phantom}
            alive |= made
        else:
            _need(problem, place, instruction, problem.bwd_inputs[node], alive)
            if not pending or pending[0] != node:
                raise _refusal(place, instruction, "is not the next backward step in order")
            if node not in graphs:
                raise _refusal(place, instruction, "has no recorded graph")
            pending.pop(0)
            graphs.discard(node)
        for storage in instruction.frees:
            if problem.storages[storage].is_phantom and instruction.kind == "F":
                graphs.discard(problem.storages[storage].producer)
        alive -= set(instruction.frees)
        if instruction.frees_state:
            states.discard(node)
    if pending:
        raise InvalidPlanError(f"the program ends before the backward of node {pending[0]}")
    lost = [s.name for i, s in enumerate(problem.storages) if s.is_output and i not in alive]
    if lost:
        raise InvalidPlanError(f"the program frees the output {lost[0]}")


def _need(
    problem: Problem,
    place: int,
    instruction: Instruction,
    storages: tuple[int, ...],
    alive: set[int],
) -> None:
    missing = [problem.storages[s].name for s in storages if s not in alive]
    if missing:
        raise _refusal(place, instruction, f"reads {missing[0]}, which is not there")


def _refusal(place: int, instruction: Instruction, what: str) -> InvalidPlanError:
    return InvalidPlanError(f"instruction {place} ({instruction.kind}{instruction.node}) {what}")
