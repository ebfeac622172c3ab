"""Repeated layers as one row: `blocks.{0..11}.mlp`."""

from __future__ import annotations

from collections.abc import Iterable


def fold(groups: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return for each (path, op) its path with at most one layer number replaced by `{}`.

    It replaces the number in which most paths of the same operation differ.
    """
    options: dict[tuple[str, str], list[str]] = {}
    members: dict[tuple[str, str], int] = {}
    for path, op in groups:
        parts = path.split(".")
        options[path, op] = []
        for i, part in enumerate(parts):
            if part.isdigit():
                label = ".".join([*parts[:i], "{}", *parts[i + 1 :]])
                options[path, op].append(label)
                members[label, op] = members.get((label, op), 0) + 1
    folded = {}
    for (path, op), labels in options.items():
        best = max(labels, key=lambda label: members[label, op], default=None)
        alone = best is None or members[best, op] == 1
        folded[path, op] = path if best is None or alone else best
    return folded


def spell(label: str, paths: Iterable[str]) -> str:
    """Replace `{}` by the range of its numbers: `blocks.{0..11}.mlp`."""
    if "{}" not in label:
        return label
    position = label.split(".").index("{}")
    numbers = sorted({int(path.split(".")[position]) for path in paths})
    if len(numbers) == 1:
        return label.replace("{}", str(numbers[0]))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    spelled = ",".join(
        str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in runs
    )
    return label.replace("{}", "{" + spelled + "}")
