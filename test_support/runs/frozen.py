"""What libraries and test files hold for ever, out of the sight of the garbage collector.

A full collection visits every object. With all test files and a few libraries that are a million,
which took half of the time of some tests.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_functions: list[FunctionType] = []  # that are frozen


class _Seeing:
    """`gc` for rkgb's search of functions by their code: those that are frozen are found, too."""

    def get_freeze_count(self) -> int:
        return 0  # of what it does not see

    def get_objects(self) -> list[Any]:
        return [*gc.get_objects(), *_functions]

    def get_referrers(self, *codes: CodeType) -> Iterator[Any]:
        wanted = {*map(id, codes)}
        yield from gc.get_referrers(*codes)
        yield from (function for function in _functions if id(function.__code__) in wanted)


def freeze() -> None:
    """Let no later collection visit what is alive now."""
    if not _functions and importlib.util.find_spec("rkgb") is not None:
        for name in ("outside.changes", "guards.sources"):
            vars(importlib.import_module(f"rkgb.{name}"))["gc"] = _Seeing()
    gc.collect()
    # No `isinstance`: it asks objects for their class, and some of torch answer with warnings.
    _functions.extend(found for found in gc.get_objects() if type(found) is FunctionType)
    gc.freeze()
