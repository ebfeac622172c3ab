"""`module:factory` names: the user's own function that returns a model and a sample."""

from __future__ import annotations

import contextlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate.errors import RockmateError


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
