"""Paths of modules in a model, such as 'layers.0.mlp'; the model itself is ''."""

from __future__ import annotations

from collections.abc import Sequence


def is_inside(path: str, around: str) -> bool:
    """Return whether a module is another one, or inside it, by their paths."""
    return not around or path == around or path.startswith(f"{around}.")


def around(paths: Sequence[str]) -> str:
    """Return the path of the innermost module around all of these."""
    parts = [path.split(".") if path else [] for path in paths]
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
