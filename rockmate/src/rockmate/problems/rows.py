"""Frozen dataclasses as JSON, and strictly back: a wrong type is refused, with its place.

Reading makes only the requested data types, from numbers, text and lists. No name in the file is
ever looked up, so a hostile file can do no more than be refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from rockmate.errors import PlanFileError

Row = TypeVar("Row")

_MOST_CHARACTERS = 1 << 28
_MOST = 1 << 62  # no size or count is larger


def parse(text: str) -> Any:
    """Return the value of JSON text; NaN and infinities are refused.

    Raises:
        PlanFileError: it is no JSON, or too long.
    """
    if len(text) > _MOST_CHARACTERS:
        raise PlanFileError(f"a text of {len(text)} characters is no plan file: it is too long")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"expected a plan file, found no JSON: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def row_of(value: Any) -> Any:
    """Return a dataclass in the types of JSON.

    Fields that are None by default are left out, so that files without them stay as they were.
    A tuple of what has an `of_text` (steps, moves) becomes one line of text.
    """
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: row_of(v) for f, v in fields if v is not None or f.default is not None}
    if isinstance(value, Mapping):
        return {key: row_of(item) for key, item in value.items()}
    if isinstance(value, tuple):
        if value and hasattr(value[0], "of_text"):
            return " ".join(map(str, value))
        return [row_of(item) for item in value]
    return value


def from_row(kind: type[Row], row: Any, place: str) -> Row:
    """Return the dataclass `kind` that a row describes; `place` names it in errors.

    Raises:
        PlanFileError: a field without a default is missing, or one is unknown or of another type;
            or the dataclass refuses the values.
    """
    if not isinstance(row, dict):
        raise PlanFileError(f"{place}: expected fields, found {_told(row)}")
    hints, needed = _hints(cast(Any, kind))
    if wrong := (row.keys() - hints.keys()) | (needed - row.keys()):
        told = ", ".join(sorted(map(str, wrong))[:4])
        raise PlanFileError(f"{place}: fields that are missing or unknown: {told[:200]}")
    values = {name: _read(hints[name], own, f"{place}.{name}") for name, own in row.items()}
    try:
        return kind(**values)
    except ValueError as error:
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"{place}: {error}") from None


@functools.cache
def _hints(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the types of the fields, and which have no default."""
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    none = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is none and f.default_factory is none}
    return {field.name: hints[field.name] for field in fields}, frozenset(needed)


def _read(hint: Any, value: Any, place: str) -> Any:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_row(cast(Any, hint), value, place)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in of:
            return None
        (hint,) = (option for option in of if option is not type(None))
        return _read(hint, value, place)
    if origin is tuple and isinstance(value, str) and hasattr(of[0], "of_text"):
        try:
            return tuple(map(of[0].of_text, value.split()))
        except ValueError as error:
            raise PlanFileError(f"{place}: {str(error)[:200]}") from None
    if origin is tuple:
        items = _typed(list, value, place)
        return tuple(_read(of[0], item, f"{place}[{i}]") for i, item in enumerate(items))
    if origin is not None and issubclass(origin, Mapping):
        return {
            key: _read(of[1], item, f"{place}.{key[:40]}")
            for key, item in _typed(dict, value, place).items()
        }
    return _number_or_text(hint, value, place)


def _number_or_text(hint: Any, value: Any, place: str) -> Any:
    if hint is float:
        if type(value) not in (int, float) or not abs(value) < _MOST:
            raise PlanFileError(f"{place}: expected a number, found {_told(value)}")
        return float(value)
    value = _typed(hint, value, place)
    if hint is int and abs(value) > _MOST:
        raise PlanFileError(f"{place}: {_told(value)} is too large for a size")
    return value


def _typed(kind: Any, value: Any, place: str) -> Any:
    if type(value) is not kind:  # isinstance would accept a bool as an int
        raise PlanFileError(f"{place}: expected {kind.__name__}, found {_told(value)}")
    return value


def _told(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MOST:
        return "a number of very many digits"
    return f"{repr(value)[:60]}"


def all_finite(values: Sequence[float]) -> bool:
    """Return whether all values are finite and not negative."""
    return all(math.isfinite(value) and value >= 0 for value in values)
