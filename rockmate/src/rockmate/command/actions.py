"""The commands: each returns text for people, and the same as data.

A command about a model takes a name `module:factory`, the user's function that makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate.errors import RockmateError
from rockmate.estimate import estimate
from rockmate.files.differences import of_inputs, of_mappings, of_problems
from rockmate.files.plan_file import PlanFile, SavedPlan
from rockmate.module import Rockmate
from rockmate.reports.plan_report import PlanReport
from rockmate.requests.identity import in_short
from rockmate.schedules.report import format_bytes
from rockmate.schedules.simulate import recompute_counts

Result = tuple[str, dict[str, Any]]


def print_result(chosen: argparse.Namespace) -> None:
    """Run the chosen command, and print its result."""
    text, data = ACTIONS[chosen.command](chosen)
    print(json.dumps(data, indent=1) if chosen.json else text)


def _estimate(chosen: argparse.Namespace) -> Result:
    model, sample = made_by(chosen.factory, meta=chosen.meta)
    found = estimate(
        model,
        sample,
        optimizer=chosen.optimizer,
        device=chosen.device,
        points=chosen.points,
        cost=chosen.cost,
    )
    return ("" if chosen.json else str(found)), found.to_dict()


def _plan(chosen: argparse.Namespace) -> Result:
    if chosen.out:
        _check_folder(chosen.out)  # before the long planning
    model, sample = made_by(chosen.factory)
    within = {"memory": chosen.budget, "optimizer": chosen.optimizer}
    within = within if chosen.memory else {"budget": chosen.budget}
    rk = Rockmate(model, sample, effort=chosen.effort, cost=chosen.cost, **within)
    text = f"{rk.memory}\n{rk.plan}" if chosen.memory else str(rk.plan)
    if chosen.out:
        rk.save_plan(chosen.out)
        text += f"\nwritten to {chosen.out}"
    data = {**_data(rk.plan_file().plans[0]), "file": chosen.out}
    return text, {**data, "memory": rk.memory.to_dict()} if chosen.memory else data


def _show(chosen: argparse.Namespace) -> Result:
    file = PlanFile.load(chosen.file)
    head = [f"{file.model}, planned with:", *(f"  {k}: {v}" for k, v in _short(file).items())]
    parts = [
        f"inputs: {', '.join(saved.inputs)}\n{_report_of(file, saved)}" for saved in file.plans
    ]
    data = {
        "model": file.model,
        "made_with": dict(file.made_with),
        "plans": [_data(saved) for saved in file.plans],
    }
    return "\n\n".join(["\n".join(head), *parts]), data


def _report(chosen: argparse.Namespace) -> Result:
    file = PlanFile.load(chosen.file)
    _check_folder(chosen.out)
    _report_of(file, file.plans[0]).html(chosen.out)
    size = Path(chosen.out).stat().st_size
    return f"written to {chosen.out} ({format_bytes(size)})", {"file": chosen.out, "bytes": size}


def _check_folder(out: str) -> None:
    """Refuse a file name whose folder does not exist.

    Raises:
        RockmateError: there is no such folder, or the name is a folder itself.
    """
    path = Path(out)
    if not path.parent.is_dir():
        raise RockmateError(f"cannot write {out!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise RockmateError(f"cannot write {out!r}: it is a folder. Name a file in it")


def _report_of(file: PlanFile, saved: SavedPlan) -> PlanReport:
    return PlanReport(
        *(saved.problem, saved.plan),
        pieces=saved.pieces,
        name=file.model,
        measured_peak_bytes=saved.measured_peak_bytes,
        made_with=in_short(file.made_with, saved.inputs),
    )


def _compare(chosen: argparse.Namespace) -> Result:
    files = [PlanFile.load(path) for path in (chosen.first, chosen.second)]
    first, second = (file.plans[0] for file in files)
    texts = of_mappings(files[0].made_with, files[1].made_with)
    texts += of_inputs(first.inputs, second.inputs)
    problems = of_problems(first.problem, second.problem)
    found = [
        text.replace("in the file", "in the first").replace(" here", " in the second")
        for text in texts + problems
    ]
    rows = [
        ("budget", *(format_bytes(saved.plan.budget_bytes) for saved in (first, second))),
        ("predicted peak", *(format_bytes(saved.plan.peak_bytes) for saved in (first, second))),
        ("overhead", *(f"{100 * saved.plan.overhead:.2f} %" for saved in (first, second))),
        ("planner", first.plan.planner, second.plan.planner),
    ]
    lines = [f"{name:<18}{a:>24}{b:>24}" for name, a, b in rows]
    if not problems:
        moved = _moved(first, second)
        found += [f"recomputed otherwise: {len(moved)} operations"] if moved else []
        found += [f"  {text}" for text in moved[:20]]
        if len(moved) > 20:
            found.append("  and more")
    data = {"first": _data(first), "second": _data(second), "differences": found}
    return "\n".join([*lines, *(found or ["the same plan"])]), data


def _moved(first: SavedPlan, second: SavedPlan) -> list[str]:
    """Return the operations with different numbers of recomputations, in words."""
    counts = [recompute_counts(saved.problem, saved.plan.steps) for saved in (first, second)]
    return [
        f"{node.op or node.name} of {node.module_path or '(root)'}: "
        f"x{a} in the first, x{b} in the second"
        for node, a, b in zip(first.problem.nodes, *counts, strict=True)
        if a != b
    ]


def _data(saved: SavedPlan) -> dict[str, Any]:
    plan = saved.plan
    return {
        "inputs": list(saved.inputs),
        "budget_bytes": saved.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": saved.measured_peak_bytes,
        "eager_peak_bytes": saved.eager_peak_bytes,
        "step_ms": plan.time_ms,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "planner": plan.planner,
        "operations": len(saved.problem.nodes),
        "opaque": [piece.path for piece in saved.pieces],
    }


def _short(file: PlanFile) -> dict[str, str]:
    return {name: file.made_with[name] for name in list(file.made_with)[:4]}


ACTIONS: Mapping[str, Callable[[argparse.Namespace], Result]] = {
    "estimate": _estimate,
    "plan": _plan,
    "show": _show,
    "report": _report,
    "compare": _compare,
}


class FactoryError(RockmateError, ValueError):
    """A name is not that of a function that returns a model and a sample."""


def made_by(name: str, *, meta: bool = False) -> tuple[nn.Module, Any]:
    """Return the model and the sample that a factory makes; with `meta`, without memory.

    Raises:
        FactoryError: there is no such module or function, it fails, or its result is no such pair.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise FactoryError(f"{name!r} is no name of a factory: write module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise FactoryError(
            f"cannot import {name!r}: {type(error).__name__}: {error}.{_here(module_name)}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise FactoryError(f"{module_name} has no {path!r}{_instead(module_name, found)}")
        found = getattr(found, part)
    if not callable(found):
        raise FactoryError(f"{name!r} is of type {type(found).__name__}, and no function")
    try:
        with torch.device("meta") if meta else contextlib.nullcontext():
            made = found()
    except Exception as error:
        raise FactoryError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise FactoryError(f"{name} returned {_told(made)}; return a tuple (model, sample)")
    return made


def _instead(module_name: str, found: Any) -> str:
    """Name what a module has that can be called, or the modules of a package without such."""
    own = [n for n, value in vars(found).items() if callable(value) and n[0] != "_"]
    if own:
        return f"; choose one of {', '.join(own)}"
    inside = sorted(found.name for found in pkgutil.iter_modules(getattr(found, "__path__", ())))
    if inside:
        named = ", ".join(f"{module_name}.{name}" for name in inside)
        return f"; it has no functions, and these modules: {named}"
    return "; it has no functions"


def _here(module_name: str) -> str:
    """Name the Python files of this folder, where no such module was found."""
    if importlib.util.find_spec(module_name.partition(".")[0]) is not None:
        return ""
    files = ", ".join(sorted(path.stem for path in Path().glob("*.py"))) or "none"
    return f" Python files in this folder: {files}"


def _told(made: Any) -> str:
    kind = type(made).__name__
    return f"a {kind} of {len(made)}" if isinstance(made, (tuple, list)) else f"type {kind}"
