"""The reference names all that the package offers, and each option with its default."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import rockmate
from rockmate import integrations
from rockmate.command.arguments import parser
from rockmate.reports.plan_report import PlanReport

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
OPTIONS = (REFERENCE / "options.md").read_text(encoding="utf-8")
CALLS = (REFERENCE / "calls.md").read_text(encoding="utf-8")
_PROPERTIES = (property, functools.cached_property)


def missing(names: list[str], text: str = CALLS) -> list[str]:
    return [name for name in names if name not in text]


def table_of(function: Callable[..., object]) -> list[tuple[str, str]]:
    """Return what the table of options shows of those that a function takes."""
    parameters = inspect.signature(function).parameters.values()
    return [
        (p.name, "" if p.default is p.empty else f"`{p.default!r}`")
        for p in parameters
        if p.name not in ("self", "options", "make_sample")
    ]


def test_every_public_name_is_in_it() -> None:
    names = [name for name in rockmate.__all__ if not name.endswith("Error")]
    assert missing([*names, *integrations.__all__], CALLS + OPTIONS) == []


def test_the_table_of_options_is_that_of_the_arguments() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", OPTIONS.partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(table_of(rockmate.Rockmate.__init__))


@pytest.mark.parametrize(
    ("function", "title"),
    [
        (rockmate.apply_to_blocks, "Of `apply_to_blocks` besides"),
        (rockmate.estimate, "Of `estimate` and `largest_batch` besides"),
        (rockmate.largest_batch, "Of `estimate` and `largest_batch` besides"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_function_takes_besides_is_in_its_table(
    function: Callable[..., object], title: str
) -> None:
    common = table_of(rockmate.Rockmate.__init__)
    names = [name for name, _ in common]
    section = OPTIONS.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", section, re.MULTILINE)
    own = [row for row in table_of(function) if row not in common]
    own = [(name, default) for name, default in own if name not in names or default]
    assert [row for row in own if row not in rows] == []


@pytest.mark.parametrize(
    "function", [integrations.RockmateCallback, integrations.LightningCallback]
)
def test_every_option_of_a_callback_is_in_its_table(function: Callable[..., object]) -> None:
    section = OPTIONS.partition("## Of the trainers' callbacks\n")[2]
    assert missing([f"`{name}`" for name, _ in table_of(function)], section) == []


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
    held = vars(rockmate.Rockmate).items()
    offered = [n for n, v in held if isinstance(v, property) and n[0] != "_"]
    assert "plan" in offered
    assert missing([f"rk.{name}" for name in offered]) == []
    methods = [n for n, v in vars(PlanReport).items() if inspect.isfunction(v) and n[0] != "_"]
    assert "html" in methods
    assert missing([f"{name}(" for name in methods]) == []
