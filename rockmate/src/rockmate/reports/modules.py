"""Kept bytes, recomputations and moves of a plan: by module, and over the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.liveness import liveness
from rockmate.schedules.moves import Moves, clocks_of, comings_of
from rockmate.schedules.plan import Plan
from rockmate.schedules.report import folded
from rockmate.schedules.simulate import recompute_counts, simulate
from rockmate.schedules.steps import Steps, end_of_forward, first_forwards

KINDS = ("forward", "recomputation", "backward", "waiting")


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, or equal ones in repeated layers, with its saved bytes and recomputations."""

    where: str  # module path, repeated layers folded
    kept_bytes: int  # held between forward and backward by the plan
    plain_bytes: int  # held there if nothing is recomputed
    runs: int  # recomputations of its nodes
    recompute_ms: float


def module_rows(problem: Problem, steps: Steps, moves: Moves = ()) -> list[ModuleRow]:
    """Return a row for each module with saved tensors, those with most bytes first.

    What is elsewhere when the backward begins is not kept.
    """
    turn = end_of_forward(steps, len(problem.nodes)) - 1
    if turn < 0:
        return []
    kept = liveness(problem, steps).after[turn] & ~comings_of(len(steps), moves).away[turn]
    plain = liveness(problem, no_recomputation(problem)).after[len(problem.nodes) - 1]
    runs = recompute_counts(problem, steps)
    rows = []
    for where, _, nodes in folded({k: (n.module_path, "") for k, n in enumerate(problem.nodes)}):
        row = ModuleRow(
            where=where,
            kept_bytes=sum(problem.bytes_of(problem.product_masks[k] & kept) for k in nodes),
            plain_bytes=sum(problem.bytes_of(problem.product_masks[k] & plain) for k in nodes),
            runs=sum(max(0, runs[k]) for k in nodes),
            recompute_ms=sum(max(0, runs[k]) * problem.nodes[k].fwd_time_ms for k in nodes),
        )
        if row.plain_bytes or row.kept_bytes or row.runs:
            rows.append(row)
    return sorted(rows, key=lambda row: (-row.plain_bytes, row.where))


@dataclass(frozen=True, slots=True)
class Columns:
    """Memory over a step, on both sides of a link: columns (from, to, bytes), times in ms."""

    kinds: dict[str, list[tuple[float, float, float]]]  # by phase; "waiting" where copies are slow
    elsewhere: list[tuple[float, float, float]]  # empty without moves
    end_ms: float


def columns(problem: Problem, plan: Plan) -> Columns:
    """Return when each step runs and what is held then, here and elsewhere."""
    timeline = simulate(problem, plan.steps, plan.moves)
    begins, away = None, None
    if plan.moves and problem.link is not None:
        begins = clocks_of(problem, plan.steps, plan.moves, problem.link).begins_ms
        away = comings_of(len(plan.steps), plan.moves).away
    kinds: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    elsewhere, now = [], 0.0
    for t, (kind, ms) in enumerate(phases(problem, plan.steps)):
        begin, held = now, timeline.peak_during[t]
        if begins is not None and begins[t] > now:
            kinds["waiting"].append((now, begins[t], float(timeline.bytes_after[t - 1])))
            begin = begins[t]
        kinds[kind].append((begin, begin + ms, float(held)))
        if away is not None:
            elsewhere.append((now, begin + ms, float(problem.bytes_of(away[t]))))
        now = begin + ms
    return Columns(kinds, elsewhere, now)


@dataclass(frozen=True, slots=True)
class MovedRow:
    """One storage on its way out and back, with the times at which the plan says so."""

    where: str
    op: str
    size_bytes: int
    out_ms: float  # the copy out may begin
    gone_ms: float  # its memory is free
    back_ms: float  # its memory is taken again, and the copy in begins


def moved_rows(problem: Problem, plan: Plan) -> list[MovedRow]:
    """Return a row for each move, the largest first."""
    if not plan.moves or problem.link is None:
        return []
    begins = clocks_of(problem, plan.steps, plan.moves, problem.link).begins_ms
    makers = {k: node for node, made in enumerate(problem.products) for k in made}

    def end(t: int) -> float:
        return begins[t] + problem.time_ms(*plan.steps[t])

    rows = []
    for move in plan.moves:
        node = problem.nodes[makers[move.storage]]
        sizes = problem.sizes[move.storage]
        times = end(move.out_after), end(move.gone_after), begins[move.back_before]
        rows.append(MovedRow(node.module_path, node.op or node.name, sizes, *times))
    return sorted(rows, key=lambda row: (-row.size_bytes, row.out_ms))


def phases(problem: Problem, steps: Steps) -> Iterator[tuple[str, float]]:
    """Yield for each step its phase ("forward", "recomputation", "backward") and its ms."""
    for is_first, (kind, k) in zip(first_forwards(steps), steps, strict=True):
        phase = "backward" if kind == "B" else "forward" if is_first else "recomputation"
        yield phase, problem.time_ms(kind, k)
