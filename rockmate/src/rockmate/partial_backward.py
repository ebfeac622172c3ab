"""The backward phase when gradients arrive at only some of the outputs.

A plan is made for gradients at every differentiable output. Where some are missing, autograd skips
the operations that lead only to them; so does this: their backward steps are dropped, then every
recomputation that only they needed. What remains alive is a subset at every step, so the budget
holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.problem import Problem
from rockmate.program import Instruction, Program


def active_nodes(
    problem: Problem,
    outputs: Sequence[Sequence[str]],
    grad_inputs: Sequence[Sequence[str]],
    start: set[str],
) -> frozenset[int]:
    """Return the nodes that a gradient reaches, starting from the values in `start`.

    `outputs[k]` are the values that node k makes, `grad_inputs[k]` those it passes gradients to.
    """
    reached = set(start)
    active = set()
    for node in problem.backward_order:
        if any(name in reached for name in outputs[node]):
            active.add(node)
            reached.update(grad_inputs[node])
    return frozenset(active)


def partial_program(
    problem: Problem, program: Program, active: frozenset[int]
) -> tuple[Instruction, ...]:
    """Return the backward phase of `program` without what only inactive nodes need."""
    needed: set[int] = set()
    kept: list[tuple[Instruction, frozenset[int]]] = []
    for instruction in reversed(program.backward_phase):
        node = instruction.node
        after = frozenset(needed)
        if instruction.kind == "B":
            if node not in active:
                continue
            needed.update(problem.bwd_inputs[node])
        else:
            made = {s for s in problem.products[node] if not problem.storages[s].is_output}
            if not made & needed:
                continue
            needed -= made
            needed.update(problem.fwd_inputs[node])
        kept.append((instruction, after))
    kept.reverse()

    alive = _alive_after_forward(problem, program)
    last = {i.node: place for place, (i, _) in enumerate(kept) if i.kind == "F"}
    result = []
    for place, (instruction, after) in enumerate(kept):
        node = instruction.node
        phantoms = {s for s in problem.products[node] if problem.storages[s].is_phantom}
        record = instruction.kind == "F" and bool(phantoms & after)
        if instruction.kind == "F":
            alive |= set(problem.products[node]) - (set() if record else phantoms)
        dead = {s for s in alive - after if not problem.storages[s].is_output}
        alive -= dead
        result.append(
            Instruction(
                kind=instruction.kind,
                node=node,
                record=record,
                frees=tuple(sorted(dead)),
                is_rerun=instruction.is_rerun,
                frees_state=last.get(node) == place and instruction.kind == "F",
            )
        )
    return tuple(result)


def _alive_after_forward(problem: Problem, program: Program) -> set[int]:
    alive: set[int] = set()
    for instruction in program.forward_phase:
        made = set(problem.products[instruction.node])
        if not instruction.record:
            made = {s for s in made if not problem.storages[s].is_phantom}
        alive |= made
        alive -= set(instruction.frees)
    return alive
