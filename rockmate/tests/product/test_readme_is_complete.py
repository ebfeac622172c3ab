"""The package's README names all that the package offers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import rockmate
from rockmate import integrations
from rockmate.command.arguments import parser
from rockmate.reports.plan_report import PlanReport

README = Path(__file__).parents[2] / "README.md"
_PROPERTIES = (property, functools.cached_property)


def missing(names: list[str]) -> list[str]:
    text = README.read_text(encoding="utf-8")
    return [name for name in names if name not in text]


def test_every_public_name_is_in_it() -> None:
    assert missing([*rockmate.__all__, *integrations.__all__]) == []


def test_every_option_is_in_it() -> None:
    options = list(inspect.signature(rockmate.Rockmate.__init__).parameters)
    assert "budget" in options
    assert missing([f"`{name}`" for name in options if name not in ("self", "model")]) == []


@pytest.mark.parametrize(
    "function",
    [
        rockmate.apply,
        rockmate.apply_to_blocks,
        rockmate.estimate,
        rockmate.largest_batch,
        integrations.RockmateCallback,
        integrations.LightningCallback,
    ],
    ids=lambda function: function.__name__,
)
def test_every_option_of_a_function_is_in_it(function: Callable[..., object]) -> None:
    options = inspect.signature(function).parameters.values()
    optional = [o.name for o in options if o.default is not o.empty]
    assert missing([f"`{name}`" for name in optional]) == []


def test_every_figure_of_an_answer_is_in_it() -> None:
    for answer in (rockmate.Estimate, rockmate.LargestBatch, rockmate.BlocksPlan):
        properties = [n for n, v in vars(answer).items() if isinstance(v, _PROPERTIES)]
        names = [n for n in (*properties, *answer.__annotations__) if n[0] != "_"]
        assert names
        assert missing([f"`{name}`" for name in names]) == []


def test_every_command_is_in_it() -> None:
    (commands,) = (a for a in parser()._actions if a.dest == "command")
    assert commands.choices
    for name, command in dict(commands.choices).items():
        options = [o for a in command._actions for o in a.option_strings if o[:2] == "--"]
        assert missing([f"rockmate {name} ", *(o for o in options if o != "--help")]) == []


def test_every_attribute_of_wrapper_and_plan_is_in_it() -> None:
    offered = [n for n, v in vars(rockmate.Rockmate).items() if isinstance(v, property)]
    assert "plan" in offered
    assert missing([f"rk.{name}" for name in offered]) == []
    methods = [n for n, v in vars(PlanReport).items() if inspect.isfunction(v) and n[0] != "_"]
    assert "html" in methods
    assert missing([f"{name}(" for name in methods]) == []
