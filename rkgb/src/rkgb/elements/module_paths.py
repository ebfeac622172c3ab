"""Paths of modules in a model, such as 'layers.0.mlp'; the model itself is ''."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

_NUMBER = re.compile(r"\d+")


def is_inside(path: str, around: str) -> bool:
    """Return whether a module is another one, or inside it, by their paths."""
    return not around or path == around or path.startswith(f"{around}.")


def is_inside_any(path: str, paths: Iterable[str]) -> bool:
    """Return whether a module is one of some others, or inside one, by their paths."""
    return any(is_inside(path, around) for around in paths)


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the modules, by their paths, that are inside none of the others; each once."""
    kept = dict.fromkeys(paths)
    return tuple(p for p in kept if not any(p != other and is_inside(p, other) for other in kept))


def group_of(path: str) -> str:
    """Return a path that is equal for repeated layers: 'blocks.#.mlp' of 'blocks.3.mlp'."""
    return _NUMBER.sub("#", path)


def around(paths: Sequence[str]) -> str:
    """Return the path of the innermost module around all of these."""
    return ".".join(common([path.split(".") if path else [] for path in paths]))


def common(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the longest beginning that all paths share."""
    same = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return [names[0] for names in same]
