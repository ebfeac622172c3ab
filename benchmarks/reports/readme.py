"""The parts of READMEs that scripts write: what is between two markers of one name."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).resolve().parents[2] / "rkgb" / "README.md"


def markers(name: str) -> tuple[str, str]:
    """Return the lines before and after the part called `name`."""
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def part(readme: str, name: str) -> str:
    """Return what is between the markers, without blank lines around it.

    Raises:
        ValueError: they are not there exactly once.
    """
    begin, end = markers(name)
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"the README must hold {begin.strip()} and {end.strip()} once each")
    return readme.split(begin)[1].split(end)[0].strip()


def with_part(readme: str, name: str, text: str) -> str:
    """Return the README with what is between the markers replaced.

    Raises:
        ValueError: they are not there exactly once.
    """
    part(readme, name)
    begin, end = markers(name)
    before, rest = readme.split(begin)
    return f"{before}{begin}\n{text.strip()}\n\n{end}{rest.split(end)[1]}"


def write_part(name: str, text: str) -> None:
    """Replace a part of rkgb's README."""
    README.write_text(with_part(README.read_text(encoding="utf-8"), name, text), encoding="utf-8")
