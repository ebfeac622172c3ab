"""Kept bytes and recomputations of a plan, by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.folding import fold, spell
from rockmate.schedules.liveness import live_after
from rockmate.schedules.simulate import recompute_counts
from rockmate.schedules.steps import Steps


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, or equal ones in repeated layers, with its saved bytes and recomputations."""

    where: str  # module path, repeated layers folded
    kept_bytes: int  # held between forward and backward by the plan
    plain_bytes: int  # held there if nothing is recomputed
    runs: int  # recomputations of its nodes
    recompute_ms: float


def module_rows(problem: Problem, steps: Steps) -> list[ModuleRow]:
    """Return a row for each module with saved tensors, those with most bytes first."""
    last = len(problem.nodes) - 1
    if last < 0:
        return []
    kept = live_after(problem, steps)[last]
    plain = live_after(problem, no_recomputation(problem))[last]
    runs = recompute_counts(problem, steps)
    places: dict[str, list[int]] = {}
    for k, node in enumerate(problem.nodes):
        places.setdefault(node.module_path, []).append(k)
    labels = fold([(path, "") for path in places])
    folded: dict[str, list[str]] = {}
    for (path, _), label in labels.items():
        folded.setdefault(label, []).append(path)
    rows = []
    for label, paths in folded.items():
        nodes = [k for path in paths for k in places[path]]
        row = ModuleRow(
            where=spell(label, paths),
            kept_bytes=sum(problem.bytes_of(problem.product_masks[k] & kept) for k in nodes),
            plain_bytes=sum(problem.bytes_of(problem.product_masks[k] & plain) for k in nodes),
            runs=sum(max(0, runs[k]) for k in nodes),
            recompute_ms=sum(max(0, runs[k]) * problem.nodes[k].fwd_time_ms for k in nodes),
        )
        if row.plain_bytes or row.kept_bytes or row.runs:
            rows.append(row)
    return sorted(rows, key=lambda row: (-row.plain_bytes, row.where))


def phases(problem: Problem, steps: Steps) -> Iterator[tuple[str, float]]:
    """Yield for each step its phase ("forward", "recomputation", "backward") and its ms."""
    for t, (kind, k) in enumerate(steps):
        node = problem.nodes[k]
        if kind == "B":
            yield "backward", node.bwd_time_ms
        else:
            yield "forward" if t < len(problem.nodes) else "recomputation", node.fwd_time_ms
