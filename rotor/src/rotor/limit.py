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
    prefix + end: base**power
    for power, prefix in enumerate(("", "K", "M", "G", "T"))
    for base, ends in ((1000, ("", "B")), (1024, ("I", "IB")))
    for end in ends
    if prefix or base == 1000
}
_NUMBER_AND_UNIT = re.compile(
    r"\s*([0-9]+(?:_[0-9]+)*|[0-9]*\.[0-9]+|[0-9]+[eE][0-9]{1,2}|[0-9]*\.[0-9]+[eE][0-9]{1,2})"
    r"\s*(%|[A-Za-z]*)\s*"
)
_MOST_GIGABYTES = 9999  # a number without a unit is ambiguous up to here


def parse_limit(limit: MemoryLimit) -> int | float:
    """Return bytes as an int, or a fraction of the plain step's peak as a float in (0, 1].

    Bytes round down. Units follow the standard: G and GB are 10^9 bytes, Gi and GiB are 2^30. Text
    without a unit is a fraction if it lies between 0 and 1 ("0.6"), and bytes if it is too large
    for a number of gigabytes ("1_000_000").

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
    if not unit and 0 < number < 1:
        return float(number)
    size = int(number * _UNITS[unit.upper()])
    if size <= 0:
        raise MemoryLimitFormatError(text, "is not positive")
    if not unit and size <= _MOST_GIGABYTES:
        own = text.strip()
        other = "100 %" if number == 1 else f"{own} GB"
        problem = f"has no unit, and could mean {own} bytes or {other}"
        raise MemoryLimitFormatError(text, problem)
    return size
