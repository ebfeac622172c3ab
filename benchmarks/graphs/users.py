"""Train many packages' models with Rockmate as their users do, and write what became of each.

$ python -m graphs.users                       # all that have no row yet; writes users.csv
$ python -m graphs.users --only timm           # one package
$ python -m graphs.users --match Bert --again  # measure rows that exist anew
$ python -m graphs.users --once                # what was trained at one budget only, at both
$ python -m graphs.users --table               # the table in README.md, from users.csv

Each model is trained for three optimizer steps, at 60 % and at 100 % of the plain peak, beside a
plain twin: outputs, gradients, buffers, parameters and random state must have the same bits, and
the self-test's peak must lie within the budget. Where 60 % is below the smallest budget, that one
is taken, and the row says so. Every model has a process of its own, and a time limit.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphs.user_models.batches import Batch, UserModel
from graphs.user_models.table import MODELS
from reports.readme import with_part

RESULTS = Path(__file__).resolve().parents[1] / "results" / "users.csv"
README = Path(__file__).resolve().parents[1] / "README.md"
FIELDS = ("package", "model", "status", "opaque", "budgets", "message", "seconds")
EXACT, PIECES = "exact", "exact with opaque piece"
STATUSES = (
    EXACT,
    PIECES,
    "refused",
    "crashed",
    "wrong",
    "over budget",
    "timeout",
    "not reproducible",
)
STEPS = 3
FRACTIONS = (0.6, 1.0)


# ------------------------------------------------------------------------------------- one model


def loss_of(result: Any) -> Tensor:
    """Return the model's own loss where it has one, else the mean square of all it returns."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    found = tensors_of(result)
    return sum((t.square().mean() for t in found if t.requires_grad), torch.zeros(()))


def tensors_of(result: Any, depth: int = 4) -> list[Tensor]:
    """Return the floating-point tensors of a result, also those in attributes, as a cache's."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.is_floating_point() else []
        elif depth and not isinstance(leaf, (nn.Module, type)):
            found += tensors_of(list(getattr(leaf, "__dict__", {}).values()), depth - 1)
    return found


def seed(number: int) -> None:
    """Set every generator that a model may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(number)


def train(model: nn.Module, batch: Batch, steps: int = STEPS) -> list[tuple[str, Tensor | None]]:
    """Train for some steps and return, named, all whose bits must agree."""
    seed(1)
    seen: list[tuple[str, Tensor | None]] = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        args, kwargs = batch(step)
        result = model(*args, **kwargs)
        loss = loss_of(result)
        loss.backward()
        outputs: list[tuple[str, Tensor | None]] = [(f"a {type(result).__qualname__}", None)]
        outputs += [(f"output {k}", t.detach().clone()) for k, t in enumerate(tensors_of(result))]
        gradients = [
            (f"gradient of {n}", None if p.grad is None else p.grad.clone())
            for n, p in model.named_parameters()
        ]
        optimizer.step()
        buffers = [(f"buffer {n}", b.clone()) for n, b in model.named_buffers()]
        drawn = [("state of random numbers", torch.get_rng_state())]
        drawn.append(("state of random", torch.tensor(random.getstate()[1])))
        rows = [("loss", loss.detach()), *outputs, *gradients, *buffers, *drawn]
        seen += [(f"step {step}, {name}", tensor) for name, tensor in rows]
    return seen + [(f"parameter {n}", p.detach().clone()) for n, p in model.named_parameters()]


def first_difference(mine: list[Any], other: list[Any]) -> str:
    """Return the name of the first tensor whose bits differ, or nothing."""
    if [n for n, _ in mine] != [n for n, _ in other]:
        return "the names or number of tensors"
    return next((n for (n, a), (_, b) in zip(mine, other, strict=True) if not same(a, b)), "")


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Compare bits: shape, type and values, with NaN equal to NaN."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def check(model: UserModel, fractions: Iterable[float] = FRACTIONS) -> dict[str, Any]:
    """Train one model plain and at the budgets, and return its row."""
    began = time.perf_counter()
    row: dict[str, Any] = {"package": model.package, "model": model.name, "opaque": ""}
    row.update({"budgets": "", "message": "", "status": "not tried"})
    seed(0)
    try:
        plain, batch = model.build()
        start = copy.deepcopy(plain)
        expected = train(plain, batch)
    except Exception as error:
        row["message"] = f"plain PyTorch: {named(error)}"
        row["seconds"] = round(time.perf_counter() - began, 1)
        return row
    used, pieces = [], []
    try:
        for fraction in fractions:
            at, opaque, peak, budget, found = planned(start, batch, fraction)
            used.append(at)
            pieces += [path or "(root)" for path in opaque]
            if difference := first_difference(found, expected):
                again = first_difference(train(copy.deepcopy(start), batch), expected)
                row["status"] = "not reproducible" if again else "wrong"
                row["message"] = f"{at}: {again or difference}"
                break
            if peak is not None and peak > budget:
                row["status"], row["message"] = "over budget", f"{at}: {peak} of {budget} bytes"
                break
        else:
            row["status"] = PIECES if pieces else EXACT
    except Exception as error:
        ours = type(error).__module__.startswith(("rockmate", "rkgb"))
        row["status"] = "refused" if ours else "crashed"
        row["message"] = named(error)
        if again := first_difference(train(copy.deepcopy(start), batch), expected):
            row["status"], row["message"] = "not reproducible", f"plain PyTorch: {again}"
        if os.environ.get("USERS_TRACE"):
            raise
    row["opaque"] = " ".join(dict.fromkeys(pieces))
    row["budgets"] = ", ".join(used)
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def planned(start: nn.Module, batch: Batch, fraction: float) -> tuple[Any, ...]:
    """Train a copy at a share of the plain peak, or at the smallest budget above that."""
    from rockmate import InfeasibleBudgetError, Rockmate

    twin = copy.deepcopy(start)
    args, kwargs = batch(0)
    seed(2)  # planning must not depend on it, nor change it
    try:
        rk = Rockmate(twin, args, fraction, kwargs=kwargs, cache=False)
        at = f"{100 * fraction:.0f} %"
    except InfeasibleBudgetError as error:
        twin = copy.deepcopy(start)
        rk = Rockmate(twin, args, error.minimum_bytes, kwargs=kwargs, cache=False)
        share = error.minimum_bytes / (rk.eager_peak_bytes or error.asked_bytes)
        at = f"{100 * share:.0f} % (the smallest)"
    found = train(rk, batch)
    opaque = rk.plan.opaque
    return at, opaque, rk.measured_peak_bytes, rk.budget_bytes, found


def named(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


# ------------------------------------------------------------------------------------- all models


def run(model: UserModel, limit: float, fractions: tuple[float, ...] = FRACTIONS) -> dict[str, Any]:
    """Check one model in a process of its own, forked so that nothing is imported twice."""
    began = time.perf_counter()
    mine, its = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(model, its, fractions))
    worker.start()
    its.close()
    row: dict[str, Any] = {"package": model.package, "model": model.name}
    row.update({"opaque": "", "budgets": "", "status": "timeout", "message": f"over {limit:.0f} s"})
    try:
        if mine.poll(limit):
            row = mine.recv()
    except EOFError:
        worker.join(5)
        row.update({"status": "wrong", "message": f"the process ended with {worker.exitcode}"})
    row.setdefault("seconds", round(time.perf_counter() - began, 1))
    worker.kill()
    worker.join()
    return row


def _work(model: UserModel, pipe: Any, fractions: tuple[float, ...]) -> None:
    warnings.simplefilter("ignore")
    pipe.send(check(model, fractions))


def import_all() -> None:
    """Import what every process needs, once. Nothing may run yet: threads do not survive a fork."""
    for name in ("torch._dynamo", "torch.export", "transformers.modeling_utils", "rockmate"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def read() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows that exist, by package and model."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return {(row["package"], row["model"]): row for row in csv.DictReader(file)}


def write(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write all rows, in the order of the table of models."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        order = [(m.package, m.name) for m in MODELS]
        writer.writerows(rows[key] for key in order if key in rows)


def trained_once(row: dict[str, Any]) -> bool:
    """Whether a model was so far trained at the first budget only."""
    return row["status"] in (EXACT, PIECES) and row["budgets"].count("%") == 1


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown of the table: counts by package, and each model that is not exact."""
    packages = list(dict.fromkeys(row["package"] for row in rows))
    shown = [s for s in (*STATUSES, "not tried") if any(r["status"] == s for r in rows)]
    lines = [f"| package | {' | '.join(shown)} |", "| --- |" + " ---: |" * len(shown)]
    for package in [*packages, "all"]:
        mine = [r for r in rows if package in (r["package"], "all")]
        counts = [sum(r["status"] == s for r in mine) for s in shown]
        lines.append(f"| {package} | {' | '.join(str(c) if c else '' for c in counts)} |")
    least = [f"{r['model']} {r['budgets'].split(' (')[0]}" for r in rows if "small" in r["budgets"]]
    if least:
        text = "60 % is below the smallest budget of these; they were trained at"
        lines += ["", f"{text}: {', '.join(least)} of the plain peak."]
    once = sum(map(trained_once, rows))
    if once:
        lines += ["", f"{once} of these {len(rows)} were so far trained at the first budget only."]
    rest = [r for r in rows if r["status"] != EXACT]
    if rest:
        lines += ["", "| model | | opaque pieces, or the message |", "| --- | --- | --- |"]
    for row in rest:
        text = ", ".join(f"`{path}`" for path in row["opaque"].split()[:3]) or row["message"][:240]
        text = text.replace("|", "\\|")
        lines.append(f"| {row['package']}, {row['model']} | {row['status']} | {text} |")
    return "\n".join(lines)


def main() -> int:
    """Run what was asked for and write the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="a package; may be repeated")
    parser.add_argument("--match", default="", help="only models whose name contains this")
    parser.add_argument("--again", action="store_true", help="also those that have a row")
    parser.add_argument("--failed", action="store_true", help="anew, those that are not exact")
    parser.add_argument("--once", action="store_true", help="anew, those trained at one budget")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one model")
    parser.add_argument("--minutes", type=float, default=1e9, help="start none after these")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    # With more threads index_put adds in any order, and plain PyTorch differs from itself.
    torch.set_num_threads(1)
    import_all()
    rows, began = read(), time.monotonic()
    for model in MODELS if not options.table else ():
        key = (model.package, model.name)
        bad = options.failed and key in rows and not rows[key]["status"].startswith(EXACT)
        half = options.once and key in rows and trained_once(rows[key])
        wanted = options.again or bad or half or key not in rows
        if not wanted or (options.only and model.package not in options.only):
            continue
        if options.match not in model.name or time.monotonic() - began > 60 * options.minutes:
            continue
        row = rows[key] = run(model, options.limit)
        shown = (row["status"], row["package"], row["model"], row["budgets"], row["opaque"])
        print(*shown, f"{row['seconds']} s", row["message"][:300], sep=" | ", flush=True)
        write(rows)
    text = table(list(rows.values()))
    README.write_text(with_part(README.read_text("utf-8"), "users", text), encoding="utf-8")
    return int(any(row["status"] == "wrong" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
