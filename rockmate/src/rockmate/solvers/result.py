"""What every solver returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Step, Steps, end_of_forward, first_forwards

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True)
class SolverResult:
    """A status, and steps if some were found.

    `optimal` and `infeasible` refer to the solver's own class of schedules, with sizes rounded up
    to its unit. In this class every node runs at most once in each stage, in order; retention
    intervals also limit the number of runs per node.
    """

    status: Status
    steps: Steps | None = None
    objective: float | None = None  # overhead in ms, or peak in bytes if that is minimised
    seconds: float = 0.0


Solver = Callable[[Problem, int, Steps], SolverResult]  # problem, budget, hint


def stages_of(problem: Problem) -> dict[int, int]:
    """Return the stage of each backward: stage s ends with the s-th backward step, from 1."""
    return {node: s + 1 for s, node in enumerate(problem.backward_order)}


def last_useful_stages(problem: Problem) -> list[int]:
    """Return for each node the last stage in which recomputing it can be of use; 0 for none.

    An output never needs a recomputation: it stays alive once made.
    """
    stage = stages_of(problem)
    last = [0] * len(problem.nodes)
    for k in reversed(range(len(problem.nodes))):
        for index in problem.products[k]:
            storage = problem.storages[index]
            if not storage.is_output:
                uses = [stage[u] for u in storage.bwd_users] + [last[u] for u in storage.fwd_users]
                last[k] = max([last[k], *uses])
    return last


def steps_of_stages(problem: Problem, stages: dict[int, list[int]]) -> Steps:
    """Return the steps that recompute the given nodes in each stage, in order."""
    steps = [Step("F", k) for k in range(len(problem.nodes))]
    for stage, node in enumerate(problem.backward_order, start=1):
        steps.extend(Step("F", k) for k in sorted(set(stages.get(stage, ()))))
        steps.append(Step("B", node))
    return tuple(steps)


def recomputed_by_stage(problem: Problem, steps: Steps) -> dict[int, list[int]]:
    """Return the nodes that the steps recompute in each stage, in the order of the steps.

    What they recompute in the forward is in no stage.
    """
    stages: dict[int, list[int]] = {}
    stage = 1
    for kind, node in steps[end_of_forward(steps, len(problem.nodes)) :]:
        if kind == "B":
            stage += 1
        else:
            stages.setdefault(stage, []).append(node)
    return stages


def recomputed_ms(problem: Problem, steps: Steps) -> float:
    """Return the time of every forward beyond each node's first."""
    return sum(
        problem.nodes[step.node].fwd_time_ms
        for is_first, step in zip(first_forwards(steps), steps, strict=True)
        if step.kind == "F" and not is_first
    )
