"""Two runs of one script, plain and planned, become a verdict."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import random
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import rockmate
from fuzz.journal import MORE_STEPS, TOLD_ONCE, Fact, Journal, Page, same
from rkgb import RkgbError
from rockmate.errors import InfeasibleBudgetError, SolverError
from rockmate.networks import offload
from rockmate.problems.link import Link
from runs.planned import computing_again

Kind = Literal[
    "equal",
    "refused",
    "both refuse",
    "lenient",
    "told",
    "silent",
    "raw error",
    "over budget",
    "self-test",
]
WRONG: tuple[Kind, ...] = ("silent", "raw error", "over budget", "self-test")
_ORDER = "called in another order"
# Settings that change no bit: storages that leave for a while, and pieces of rows.
BESIDE: dict[str, dict[str, Any]] = {"moves": {"offload": "host"}, "cuts": {"split": "exact"}}
_WRAPS: dict[str, Any] = {"Rockmate": rockmate.Rockmate, "apply": rockmate.apply}
_LINK = Link(1e9, 1e9)  # over which everything can be moved, on every machine
_OURS = (rockmate.RockmateError, RkgbError)


@dataclass(frozen=True)
class Choice:
    """How the module is planned."""

    budget: int | float = 1.0
    planner: str = "recompute_all"
    how: str = "Rockmate"
    self_test: bool = False
    beside: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a case; refusals of one reason have the same `signature`."""

    kind: Kind
    event: str = ""
    text: str = ""
    signature: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether a search has found something."""
        return self.kind in WRONG

    def __str__(self) -> str:
        return self.kind if self.kind == "equal" else f"{self.kind} at '{self.event}': {self.text}"


def judge(source: str, choice: Choice, name: str = "case.py") -> Verdict:
    """Run a script plain and planned, and compare what the two show.

    Raises:
        Exception: the script does not run with plain PyTorch either.
    """
    plain = _run(source, None, name)
    planned = _run(source, choice, name)
    return _compared(plain, planned)


# ------------------------------------------------------------------------------- running


def _run(source: str, choice: Choice | None, name: str) -> Journal:
    """Run a script in a world of its own: its globals, its random numbers, its warnings."""
    with _world() as said, _recomputing(choice):
        space: dict[str, Any] = {"__name__": "case"}
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        exec(compile(source, name, "exec"), space)
        journal = Journal(space, said, planned=choice is not None)
        model, sample = space["build"]()
        with journal.event("planning", model):
            if choice is not None:
                model = _planned(model, sample, choice)
        if journal.pages[0].error is None:
            space["train"](model, journal)
        return journal


def _planned(model: nn.Module, sample: Any, choice: Choice) -> nn.Module:
    """Plan a module; where the budget is too small, within the smallest that is accepted."""
    budget, planner = choice.budget, choice.planner
    beside = BESIDE.get(choice.beside, {})
    if "offload" in beside:
        here = torch.get_default_device()
        offload._measured["host", here] = _LINK
    for left in (3, 2, 1, 0):
        try:
            options = {"self_test": choice.self_test, **beside}
            if "offload" not in beside:
                options["cost"] = "flops"
            if choice.how == "apply_to_blocks":
                return _by_blocks(model, sample, budget, options)
            options |= {"planner": planner, "cache": False, "progress": False}
            made = _WRAPS[choice.how](model, sample, budget, **options)
        except InfeasibleBudgetError as error:
            budget = error.minimum_bytes
            if not left:
                raise
        except SolverError:  # of all plans of this planner, none is so small
            planner = "auto"
            if not left:
                raise
        else:
            break
    return model if made is None else made


def _recomputing(choice: Choice | None) -> AbstractContextManager[None]:
    """For a budget in bytes, with room for everything, have what recomputes taken though."""
    if choice is None or not isinstance(choice.budget, int):
        return nullcontext()
    return computing_again(choice.planner)


def _by_blocks(
    model: nn.Module, sample: Any, budget: int | float, options: Mapping[str, Any]
) -> nn.Module:
    names = {type(child).__name__ for child in model.children()}
    options = {"blocks": [name for name in names if name.startswith("Block")], **options}
    plan = rockmate.apply_to_blocks(model, sample, budget, compare=False, **options)
    vars(model)["_budget_bytes"] = plan.budget_bytes
    return model


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def warn(self, message: object, *_: Any, **__: Any) -> None:
        text = str(message)
        if any(words in text for words in ("budget", _ORDER, TOLD_ONCE)):  # torch says none of it
            self.texts.append(text)


@contextlib.contextmanager
def _world() -> Iterator[list[str]]:
    """Give every run the same start, and leave none of its traces to the next."""
    handler, logger = _Said(), logging.getLogger("rockmate")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            torch.enable_grad(),
        ):
            warnings.simplefilter("always")
            warnings.showwarning = handler.warn  # put back with the filters
            yield handler.texts
    finally:
        torch.set_num_threads(threads)
        logger.removeHandler(handler)
        logger.propagate = propagates


# ------------------------------------------------------------------------------- comparing


def _compared(plain: Journal, planned: Journal) -> Verdict:
    is_told = any(_ORDER in text for text in planned.said)
    told = ("order",) if is_told else ()
    for theirs, ours in zip(plain.pages, planned.pages, strict=False):
        verdict = _of_errors(theirs, ours) or _of_facts(theirs, ours, but=told)
        if verdict is not None:
            # A refusal leaves the module as it was; an error of plain PyTorch, half changed.
            both = theirs.error is not None and (
                isinstance(ours.error, _OURS) or _is_earlier(theirs.error, ours.error)
            )
            if _is_planning(ours):  # a plain step is run there, too
                both = any(_is_earlier(page.error, ours.error) for page in plain.pages)
                both |= verdict.kind == "refused" and plain.failed()
            if both:
                return replace(verdict, kind="both refuse", signature="both refuse")
            if is_told and verdict.kind == "silent":  # hooks draw random numbers
                return replace(verdict, kind="told", signature="told")
            return verdict
        for peak in planned.peaks:
            if peak.page == ours.name and peak.peak_bytes > peak.budget_bytes and not peak.said:
                text = f"{peak.peak_bytes} bytes of {peak.budget_bytes}"
                return Verdict("over budget", ours.name, text, f"over budget {_form(ours.name)}")
        theirs_kept, ours_kept = (j.kept_bytes.get(ours.name, 0) for j in (plain, planned))
        if ours_kept > theirs_kept:
            text = f"{MORE_STEPS} steps keep {ours_kept} bytes, plain {theirs_kept}"
            return Verdict("over budget", ours.name, text, f"bytes kept {_form(ours.name)}")
    return Verdict("equal")


def _of_errors(theirs: Page, ours: Page) -> Verdict | None:
    """Return the verdict on an event that ended in an error, plain or planned."""
    error = ours.error
    if error is None:
        if theirs.error is None:
            return None
        text = f"plain PyTorch raises {_said(theirs.error)}"
        return Verdict("lenient", ours.name, text, f"lenient {_form(ours.name)}")
    if isinstance(error, _OURS) and theirs.error is not None:
        return None
    if isinstance(error, _OURS):
        found = (
            _of_facts(theirs, ours, only=("parameter", "buffer")) if _is_planning(ours) else None
        )
        if found is not None:
            return Verdict(
                "silent", ours.name, f"{found.text}, after {_said(error)}", "traces left"
            )
        if isinstance(error, rockmate.SelfTestError):  # it is refused, and is a fault of ours
            return Verdict("self-test", ours.name, _said(error), f"self-test {_form(ours.name)}")
        words = " ".join(str(error).split("at case")[0].split()[:14])
        return Verdict("refused", ours.name, _said(error), f"{type(error).__name__}: {words}")
    if theirs.error is not None and type(theirs.error) is type(error):
        return None
    where = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in where if _is_ours(frame.filename)] or list(where)
    line = f"{Path(own[-1].filename).name}:{own[-1].name}"
    text = f"{_said(error)} [{line}:{own[-1].lineno}]"
    if theirs.error is not None:
        text += f"; plain PyTorch raises {_said(theirs.error)}"
    return Verdict("raw error", ours.name, text, f"{type(error).__name__} in {line}")


def _of_facts(
    theirs: Page, ours: Page, only: tuple[str, ...] = ("",), but: tuple[str, ...] = ()
) -> Verdict | None:
    differ = [
        name
        for name in theirs.facts.keys() | ours.facts.keys()
        if name.startswith(only)
        and not name.startswith(but)
        and not same(theirs.facts.get(name, "missing"), ours.facts.get(name, "missing"))
    ]
    if not differ:
        return None
    order = [*ours.facts, *theirs.facts]
    differ.sort(key=order.index)
    first = differ[0]
    text = f"{first}: {_far(theirs.facts.get(first), ours.facts.get(first))}"
    if len(differ) > 1:
        text += f", and {len(differ) - 1} more ({', '.join(differ[1:4])})"
    subject = first.split()[0]
    return Verdict("silent", ours.name, text, f"silent {subject} at {_form(ours.name)}")


def _is_earlier(theirs: Exception | None, ours: Exception | None) -> bool:
    """Whether ours is plain PyTorch's own error, which may come earlier or later in a step."""
    if "modified by an inplace operation" in str(theirs):  # in other words inside of whole parts
        return "inplace operation" in str(ours) or "changed in place" in str(ours)
    return str(ours) == str(theirs) and "a second time" in str(theirs)


def _far(theirs: Fact, ours: Fact) -> str:
    """Say how far apart two facts are."""
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if theirs.shape == ours.shape and theirs.dtype == ours.dtype and theirs.numel():
            far = (theirs.to(torch.cdouble) - ours.to(torch.cdouble)).abs().max().item()
            return f"{far:.3g} off of {theirs.abs().max().item():.3g}"
        return f"{tuple(ours.shape)} {ours.dtype}, plain {tuple(theirs.shape)} {theirs.dtype}"
    return f"{_short(ours)}, plain {_short(theirs)}"


def _short(value: Fact) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = str(value)
    return text if len(text) < 60 else f"{text[:60]}…"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _is_planning(page: Page) -> bool:
    return page.name == "planning"


def _is_ours(filename: str) -> bool:
    return any(
        f"/{package}/src/{package}/" in filename for package in ("rkgb", "rotor", "rockmate")
    )


def _form(event: str) -> str:
    return event.split(" ", 1)[-1]
