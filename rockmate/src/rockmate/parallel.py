"""Solves independent problems in parallel.

The solvers release Python's lock while they run, so threads are enough. Results do not depend on
the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_MOST = 8  # each solver takes memory, and models are built under Python's lock


def map_in_parallel(function: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
    """Return `function` of every item, in order; raise the first item's error, if any."""
    work = list(items)
    threads = min(len(work), os.cpu_count() or 1, _MOST)
    if threads < 2:
        return [function(item) for item in work]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, work))
