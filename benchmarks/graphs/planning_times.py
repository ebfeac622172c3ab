"""How long the models of many packages take to plan, and to be refused.

    $ python -m graphs.planning_times              # a third of the users' models, 4 minutes
    $ python -m graphs.planning_times --every 1    # all of them

Each is planned at 60 % of its plain peak with the default effort, or at the smallest budget where
that is less, and then for a tenth of that, which is refused with what would be feasible. Seconds
are those of the clock, of the whole of `Rockmate(...)`; every model has a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from graphs.user_models.batches import UserModel
from graphs.user_models.table import MODELS
from graphs.users import import_all, named, seed
from harness import meter

RESULTS = meter.RESULTS / "planning_models.csv"
SHARE = 0.6
_LIMIT_S = 300.0


def measure(model: UserModel) -> dict[str, Any]:
    """Plan one model and have it refused; return its row."""
    from rockmate import InfeasibleBudgetError, Rockmate

    row: dict[str, Any] = {"package": model.package, "model": model.name}
    row.update({"nodes": "", "budget": "", "planning_s": "", "refusal_s": "", "message": ""})
    seed(0)
    module, batch = model.build()
    args, kwargs = batch(0)
    module(*args, **kwargs)  # what libraries load at a first step is not planning
    budget: float | int = SHARE
    try:
        began = time.perf_counter()
        try:
            rk = Rockmate(module, args, budget, kwargs=kwargs, cache=False)
        except InfeasibleBudgetError as error:
            budget, began = error.minimum_bytes, time.perf_counter()
            rk = Rockmate(module, args, budget, kwargs=kwargs, cache=False)
        row["planning_s"] = round(time.perf_counter() - began, 2)
        row["nodes"] = len(rk.plan.problem.nodes)
        row["budget"] = f"{SHARE:.0%}" if budget == SHARE else "smallest"
        began = time.perf_counter()
        try:
            Rockmate(module, args, rk.budget_bytes // 10, kwargs=kwargs, cache=False)
        except InfeasibleBudgetError:
            row["refusal_s"] = round(time.perf_counter() - began, 2)
    except Exception as error:
        row["message"] = named(error)
    return row


def _work(model: UserModel, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send(measure(model))
    except ImportError:  # its package is not here
        pipe.send(None)


def run(model: UserModel) -> dict[str, Any] | None:
    """Measure one model in a forked process; None where it cannot be built, or the process ends."""
    mine, its = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(model, its))
    worker.start()
    its.close()
    try:
        row: dict[str, Any] | None = mine.recv() if mine.poll(_LIMIT_S) else None
    except EOFError:
        row = None
    worker.kill()
    worker.join()
    return row


def main() -> int:
    """Measure what was asked for, and write rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=3, help="each of so many models")
    parser.add_argument("--match", default="", help="only models whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import_all()
    environment = meter.environment(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    chosen = [model for model in MODELS if options.match in model.name][:: options.every]
    for model in chosen:
        row = run(model)
        if row is None:
            continue
        print(*row.values(), sep=" | ", flush=True)
        rows.append(row)
        meter.write_csv(options.out, [{**r, **environment} for r in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
