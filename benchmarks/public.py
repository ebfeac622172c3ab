"""Plans of instances that other people published, checked by their rules.

    $ .venv/bin/python benchmarks/public.py                 # clones into results/latest/public
    $ .venv/bin/python benchmarks/public.py --from DIR      # where the clones are already
    $ .venv/bin/python benchmarks/public.py --only checkmate --effort balanced,60 --share 0.9

Checkmate's training graphs as Moccasin published them, and Moccasin's random graphs, at Moccasin's
budgets; DTR's logs; chains against Revolve's count of steps, where `checkpoint_schedules` is
installed. Budgets are shares of the peak without recomputation. Each plan is run on the original
graph by `public_graphs.walk`, which knows no planner: a plan that does not compute the graph within
the budget ends this program.

The bound holds for all schedules that run the forward once as it stands and the backward in its
order, with any forwards again in between. Random graphs have no backward, so their rows have no
bound. They are planned twice, and the faster plan counts: as a forward, in which operations run
again, and with all that is behind the first moment at which everything kept would not fit as the
backward, for which there is a longer search.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from harness.meter import RESULTS, environment, write_csv
from public_graphs import files
from public_graphs.chains import CHAINS, revolve_problem, steps_of_revolve
from public_graphs.encoding import encode
from public_graphs.graph import OperationGraph
from public_graphs.walk import Walk, walk
from rockmate import InfeasibleBudgetError
from rockmate.planning import Plan, plan

Row = dict[str, object]
SHARES = {"Checkmate": (0.9, 0.8), "Moccasin, random": (0.9, 0.8), "DTR": (0.8, 0.6, 0.4)}
DOWNLOADS = RESULTS / "latest" / "public"
# Larger graphs of a source are left out unless they are asked for: a plan of them takes minutes.
MOST_OPERATIONS = 1500


def processor_seconds() -> float:
    """Return the processor time of this process and of those it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def row_of(source: str, graph: OperationGraph, share: float, effort: str | float) -> Row:
    """Plan one graph within a share of its peak, and run the plan on the graph."""
    without = walk(graph, range(len(graph.operations)))
    budget = math.ceil(without.peak_bytes * share)
    row: Row = {
        "source": source,
        "graph": graph.name,
        "operations": len(graph.operations),
        "share": share,
        "budget_bytes": budget,
        "effort": effort,
    }
    is_random = graph.head == 0
    heads = (len(graph.operations), _fitting(graph, budget)) if is_random else (graph.head,)
    began = processor_seconds()
    plans: list[tuple[Walk, Plan]] = []
    refused: list[InfeasibleBudgetError] = []
    for head in heads:
        encoding = encode(graph.with_head(head))
        try:
            found = plan(encoding.problem, budget, effort=effort)
        except InfeasibleBudgetError as error:
            refused.append(error)
        else:
            plans.append((walk(graph, encoding.sequence(found.steps), budget), found))
    if not plans:
        row["status"] = "infeasible"
        row["least_share"] = round(refused[0].minimum_bytes / without.peak_bytes, 4)
        row["bound_share"] = round(refused[0].bound_bytes / without.peak_bytes, 4)
        return row
    row["seconds"] = round(processor_seconds() - began, 1)
    walked, found = min(plans, key=lambda one: one[0].time)
    row |= {"status": "ok", "peak_bytes": walked.peak_bytes, "planner": found.planner}
    extra = 100 * (walked.time / graph.time - 1)
    row["extra_percent"] = round(extra, 4)
    return row if is_random else row | _bound(found, extra)


def _fitting(graph: OperationGraph, budget_bytes: int) -> int:
    """Return how many operations run before the budget is met for the first time."""
    low, high = 1, len(graph.operations)
    while low < high:
        middle = (low + high + 1) // 2
        if _peak_of_first(graph, middle) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _peak_of_first(graph: OperationGraph, count: int) -> int:
    """Return the peak while the first operations run, of which later ones read some."""
    read_later = {read for operation in graph.operations[count:] for read in operation.reads}
    first = tuple(
        replace(
            operation,
            results=tuple(
                replace(result, is_kept=result.is_kept or (place, which) in read_later)
                for which, result in enumerate(operation.results)
            ),
        )
        for place, operation in enumerate(graph.operations[:count])
    )
    return walk(OperationGraph(graph.name, first, 0), range(count)).peak_bytes


def _bound(found: Plan, extra: float) -> Row:
    if found.bound_ms is None:
        return {}
    bound = 100 * (found.bound_ms / found.base_time_ms - 1)
    return {"bound_percent": round(bound, 4), "gap_points": round(max(0.0, extra - bound), 4)}


def chain_row(steps: int, slots: int, effort: str | float) -> Row:
    """Plan a chain, beside Revolve."""
    problem, budget = revolve_problem(steps, slots)
    began = processor_seconds()
    found = plan(problem, budget, effort=effort, planner="rotor")
    row: Row = {
        "source": "Revolve",
        "graph": f"{steps} steps, {slots} slots",
        "operations": 2 * steps,
        "budget_bytes": budget,
        "effort": effort,
        "seconds": round(processor_seconds() - began, 1),
        "status": "ok",
        "peak_bytes": found.peak_bytes,
        "planner": found.planner,
        "extra_percent": round(100 * found.overhead, 4),
    }
    theirs = steps_of_revolve(steps, slots)
    if theirs is None:
        print("checkpoint_schedules is not installed: pip install checkpoint_schedules")
        return row
    return row | {
        "published_percent": round(100 * (theirs[0] / steps - 1), 4),
        "published_by": f"checkpoint_schedules {theirs[1]}, run here",
    }


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows that are asked for."""
    efforts = [float(e) if e[0].isdigit() else e for e in options.effort.split(",")]
    if options.only.lower() in "revolve":
        yield from (chain_row(*chain, "fast") for chain in CHAINS)
    for source, graph in files.graphs(options.folder, options.only):
        if len(graph.operations) > MOST_OPERATIONS and not options.only:
            print(f"{graph.name}: {len(graph.operations)} operations, only if asked for by --only")
            continue
        for share in [options.share] if options.share else SHARES[source]:
            yield from (row_of(source, graph, share, effort) for effort in efforts)


def _text(row: Row, column: str) -> str:
    return str(row.get(column, ""))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="folder", type=Path, help="folder of the clones")
    parser.add_argument("--only", default="", help="sources or graphs whose name contains it")
    parser.add_argument("--share", type=float, help="one budget instead of all")
    parser.add_argument("--effort", default="60", help="efforts of planning, with commas between")
    parser.add_argument("--out", type=Path, default=RESULTS / "public.csv")
    options = parser.parse_args()
    rows: list[Row] = []
    if options.out.exists():
        with options.out.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    stamp = environment(torch.device("cpu"))
    try:
        if options.folder is None:
            options.folder = DOWNLOADS
            files.clone(options.folder)
        for row in rows_of(options):
            same = ("source", "graph", "share", "effort")
            rows = [
                old for old in rows if any(str(old.get(k, "")) != str(row.get(k, "")) for k in same)
            ]
            rows.append(row | stamp)
            write_csv(options.out, rows)
            shown = ("graph", "share", "effort", "status", "extra_percent", "gap_points", "seconds")
            print(*(f"{row[name]}" for name in shown if name in row), sep="\t", flush=True)
    except files.NotThereError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
