"""Functions made from generated source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any


def define(head: str, body: Iterable[str], scope: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function `def {head}:` whose lines are `body` and whose globals are `scope`.

    Equal sources are compiled once: equal layers, whose constants differ only in `scope`, share
    their code. The source stands in the function's `__source__`, for debugging.
    """
    source = f"def {head}:\n" + "".join(f"    {line}\n" for line in body)
    space = dict(scope)
    exec(_compiled(source), space)
    function: Callable[..., Any] = space[head.partition("(")[0]]
    function.__source__ = source  # type: ignore[attr-defined]
    return function


@functools.lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType:
    return compile(source, "<rkgb generated>", "exec")
