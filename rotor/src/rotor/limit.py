"""Read a memory limit: bytes, text with a unit, or a fraction of the plain step's peak."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral, Real
from typing import TypeAlias

from rotor.errors import MemoryLimitFormatError

MemoryLimit: TypeAlias = int | float | str
"""What a limit may be given as; an int is always bytes, and a float never is."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]{1,2})?)\s*(%|[A-Za-z]*)\s*")


def parse_limit(limit: MemoryLimit) -> int | float:
    """Return bytes as an int, or a fraction of the plain step's peak as a float in (0, 1].

    Bytes round down. Units follow the standard: GB is 10^9 bytes, GiB is 2^30.

    Raises:
        MemoryLimitFormatError: the value is not positive, a float above 1, or unreadable.
    """
    if isinstance(limit, str):
        return _from_text(limit)
    if isinstance(limit, bool) or not isinstance(limit, Real):
        raise MemoryLimitFormatError(limit, f"is a {type(limit).__name__}")
    if not limit > 0:
        raise MemoryLimitFormatError(limit, "is not positive")
    if isinstance(limit, Integral):
        return int(limit)
    if limit > 1:
        raise MemoryLimitFormatError(
            limit, "is a float above 1, which could mean bytes or a factor"
        )
    return float(limit)


def _from_text(text: str) -> int | float:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise MemoryLimitFormatError(text, "cannot be read")
    number, unit = Fraction(match[1]), match[2]  # a float would lose bytes of 1.005 GB
    if unit == "%":
        if not 0 < number <= 100:
            raise MemoryLimitFormatError(text, "is not in (0 %, 100 %]")
        return float(number / 100)
    if unit.upper() not in _UNITS:
        raise MemoryLimitFormatError(text, f"has an unknown unit {unit!r}")
    size = int(number * _UNITS[unit.upper()])
    if size <= 0:
        raise MemoryLimitFormatError(text, "is not positive")
    return size
