"""The package's README names all that the package offers."""

from __future__ import annotations

import inspect
from pathlib import Path

import rockmate
from rockmate import integrations
from rockmate.reports.plan_report import PlanReport

README = Path(__file__).parents[1] / "README.md"


def missing(names: list[str]) -> list[str]:
    text = README.read_text(encoding="utf-8")
    return [name for name in names if name not in text]


def test_every_public_name_is_in_it() -> None:
    assert missing([*rockmate.__all__, *integrations.__all__]) == []


def test_every_option_is_in_it() -> None:
    options = list(inspect.signature(rockmate.Rockmate.__init__).parameters)
    assert "budget" in options
    assert missing([f"`{name}`" for name in options if name not in ("self", "model")]) == []


def test_every_attribute_of_wrapper_and_plan_is_in_it() -> None:
    offered = [n for n, v in vars(rockmate.Rockmate).items() if isinstance(v, property)]
    assert "plan" in offered
    assert missing([f"rk.{name}" for name in offered]) == []
    methods = [n for n, v in vars(PlanReport).items() if inspect.isfunction(v) and n[0] != "_"]
    assert "html" in methods
    assert missing([f"{name}(" for name in methods]) == []
