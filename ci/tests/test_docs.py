"""The documentation is whole: every page is in its menu, every error in its table."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import rkgb
import rockmate
import rotor

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "rockmate/README.md"]


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w/-]+\.md)$", menu, re.MULTILINE)
    assert sorted(listed) == [str(path.relative_to(ROOT / "docs")) for path in PAGES]


def test_the_first_page_leads_to_every_other() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES} - {"index.md"}
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", index)) == pages


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 125


@pytest.mark.parametrize("path", [*PAGES, *READMES], ids=lambda path: path.stem)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.filterwarnings("ignore")  # of the libraries that switches are for
def test_what_the_reference_shows_exists() -> None:
    shown = [
        name
        for path in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(shown) > 10
    for name in shown:
        assert pkgutil.resolve_name(name).__doc__, name


@pytest.mark.parametrize("package", [rkgb, rockmate, rotor], ids=lambda package: package.__name__)
def test_every_error_is_explained(package: object) -> None:
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    names = [name for name in vars(package) if name.endswith("Error")]
    assert names
    assert [name for name in names if f"`{name}`" not in page] == []
