"""Errors of the three packages come out of a worker process with all their data."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import rkgb
import rockmate
import rotor
from rockmate.planners import plan
from zoo.problems import gpt_problem


def error_classes() -> Iterator[type[Exception]]:
    """All exceptions that a module of the packages defines."""
    for package in (rkgb, rotor, rockmate):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                here = getattr(value, "__module__", None) == module.__name__
                if here and inspect.isclass(value) and issubclass(value, Exception):
                    yield value


ERRORS = sorted(set(error_classes()), key=lambda error: (error.__module__, error.__qualname__))
WAYS: dict[str, Callable[[Exception], Exception]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
}


def example(kind: type[Exception]) -> Exception:
    """An error whose every argument differs from the others and from the default."""
    if "__init__" not in {name for base in kind.__mro__ for name in own_names(base)}:
        return kind("asked; found; do")
    positional, named = [], {}
    for number, parameter in enumerate(inspect.signature(kind).parameters.values()):
        value = f"text {number}" if "str" in str(parameter.annotation) else 1000 + number
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    return kind(*positional, **named)


def own_names(base: type) -> list[str]:
    """Names that a class of the packages defines itself; none for those of Python."""
    ours = base.__module__.split(".")[0] in ("rkgb", "rotor", "rockmate")
    return list(vars(base)) if ours else []


def test_the_errors_of_all_packages_are_found() -> None:
    for package in (rkgb, rotor, rockmate):
        exported = {getattr(package, n) for n in package.__all__ if n.endswith("Error")}
        assert exported
        assert exported <= {*ERRORS}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_an_error_keeps_its_data(kind: type[Exception], way: str) -> None:
    error = example(kind)
    error.add_note("a note of the worker")
    found = WAYS[way](error)
    assert type(found) is kind
    assert str(found) == str(error)
    assert found.args == error.args
    assert vars(found) == vars(error)
    if isinstance(error, ImportError):
        assert isinstance(found, ImportError)
        assert found.msg == error.msg


def test_a_refused_budget_crosses_a_process_border() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future = pool.submit(plan, gpt_problem(1), 1, effort="fast")
        with pytest.raises(rockmate.InfeasibleBudgetError, match="raise the budget") as caught:
            future.result(timeout=300)
    assert caught.value.asked_bytes == 1
    assert caught.value.minimum_bytes > 1
