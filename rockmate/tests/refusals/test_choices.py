"""What is chosen by name is checked before any work; refusals name the choices."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

from rockmate import RockmateError, SolverUnavailableError, UnknownChoiceError
from rockmate.planners import EFFORTS, PLANNERS, plan
from rockmate.settings import COSTS, Settings
from rockmate.solvers import BACKENDS
from zoo.problems import gpt_problem

KNOWN = {"cost": COSTS, "effort": tuple(EFFORTS), "planner": tuple(PLANNERS), "backend": BACKENDS}


@pytest.mark.parametrize("option", KNOWN)
def test_every_known_name_is_accepted(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether the extras are installed here is not what is asked.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name in KNOWN[option]:
        choice: dict[str, Any] = {option: name}
        assert getattr(Settings(**choice), option) == name
    assert getattr(Settings(), option) in KNOWN[option]


@pytest.mark.parametrize("option", KNOWN)
@pytest.mark.parametrize("asked", ["", "Fast", "flop", None, ["auto"], b"none"])
def test_an_unknown_choice_is_refused_with_the_choices(option: str, asked: Any) -> None:
    choice: dict[str, Any] = {option: asked}
    with pytest.raises(UnknownChoiceError) as caught:
        Settings(**choice)
    error = caught.value
    assert isinstance(error, RockmateError)
    assert isinstance(error, ValueError)
    assert (error.option, error.asked, error.choices) == (option, asked, KNOWN[option])
    assert str(error).startswith(f"{option} {asked!r} is unknown; choose ")
    assert ", ".join(KNOWN[option]) in str(error)


@pytest.mark.parametrize("seconds", [1, 0.5, 3600])
def test_an_effort_may_be_seconds(seconds: float) -> None:
    assert Settings(effort=seconds).effort == seconds


@pytest.mark.parametrize("effort", [0, -1, math.nan, True, 1j])
def test_an_effort_that_is_no_time_is_refused(effort: Any) -> None:
    with pytest.raises(UnknownChoiceError, match="best, or a positive number of seconds"):
        Settings(effort=effort)


def test_a_backend_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SolverUnavailableError, match=r"pip install 'rockmate\[gurobi\]'"):
        Settings(backend="gurobi")
    Settings(backend="cp-sat")


@pytest.mark.parametrize("option", ["effort", "planner", "backend"])
def test_planning_refuses_the_same_although_nothing_has_to_be_searched(option: str) -> None:
    choice: dict[str, Any] = {option: "magic"}
    with pytest.raises(UnknownChoiceError, match=f"{option} 'magic' is unknown"):
        plan(gpt_problem(1), 1 << 40, **choice)
