"""Whether a line of Python reads a value only to raise an error: an assert, or `if …: raise`."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from pathlib import Path
from types import FrameType

import torch

_RKGB_DIR = str(Path(__file__).parents[1])
# Between a line and the operation that it runs.
_WRAPPERS = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_tensor.py", "_ops.py"))


def only_raises() -> bool:
    """Return whether the running line reads a value only to raise an error."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_RKGB_DIR, *_WRAPPERS)):
        frame = frame.f_back
    if frame is None:
        return False
    line = frame.f_lineno
    return any(start <= line <= end for start, end in _checks(frame.f_code.co_filename))


@functools.lru_cache(maxsize=256)
def _checks(filename: str) -> tuple[tuple[int, int], ...]:
    """Return the lines of the conditions in a file that lead only to an error."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # no source, or a template's
        return ()
    found = []
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, (ast.If, ast.Assert)) and (raises or isinstance(node, ast.Assert)):
            found.append((node.test.lineno, node.test.end_lineno or node.test.lineno))
    return tuple(found)
