"""Read a budget: bytes, text with a unit, or a fraction of eager's activation peak."""

from __future__ import annotations

import re
from numbers import Integral, Real

from rockmate.errors import BudgetFormatError

Budget = int | float | str

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
_FORMS = "an int (bytes), a float in (0, 1] (fraction of eager's activation peak), or text such as "
_FORMS += "'2GiB', '800 MB' or '40%'"


def parse_budget(budget: Budget) -> tuple[int | None, float | None]:
    """Return (bytes, None) or (None, fraction of eager's activation peak).

    Bytes round down. Units follow the standard: GB is 10^9 bytes, GiB is 2^30.

    Raises:
        BudgetFormatError: the value is not positive, a float above 1, or unreadable.
    """
    if isinstance(budget, bool) or not isinstance(budget, (Real, str)):
        raise BudgetFormatError(f"budget {budget!r} is a {type(budget).__name__}. Give {_FORMS}.")
    if isinstance(budget, str):
        return _from_text(budget)
    if not budget > 0:
        raise BudgetFormatError(f"budget {budget!r} is not positive. Give {_FORMS}.")
    if isinstance(budget, Integral):
        return int(budget), None
    if budget > 1:
        raise BudgetFormatError(
            f"budget {budget!r} is a float above 1, which could mean bytes or a factor. "
            f"Give {_FORMS}."
        )
    return None, float(budget)


def _from_text(text: str) -> tuple[int | None, float | None]:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*(%|[A-Za-z]*)\s*", text)
    if match is None:
        raise BudgetFormatError(f"budget {text!r} cannot be read. Give {_FORMS}.")
    number, unit = float(match.group(1)), match.group(2)
    if unit == "%":
        if not 0 < number <= 100:
            raise BudgetFormatError(f"budget {text!r} is not in (0 %, 100 %]. Give {_FORMS}.")
        return None, number / 100
    if unit.upper() not in _UNITS:
        raise BudgetFormatError(f"budget {text!r} has an unknown unit '{unit}'. Give {_FORMS}.")
    size = int(number * _UNITS[unit.upper()])
    if size <= 0:
        raise BudgetFormatError(f"budget {text!r} is not positive. Give {_FORMS}.")
    return size, None
