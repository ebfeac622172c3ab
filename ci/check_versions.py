"""Check that the three packages carry one version, everywhere it is written.

The version of rkgb is taken as the truth; compared with it are the other packages' metadata, the
exact pins of rockmate on its siblings, `__version__` where a package writes one, CITATION.cff and
the newest entry of CHANGELOG.md. The smallest Python is one for all packages and texts.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

SAYING_PYTHON = ("README.md", "docs/index.md", "CONTRIBUTING.md", "constraints.txt")
DISTRIBUTIONS = {"rkgb": "rkgb", "rotor": "rk-rotor", "rockmate": "rockmate"}


def problems(root: Path) -> Iterator[str]:
    """Yield one line per place that disagrees."""
    metadata = {
        package: tomllib.loads((root / package / "pyproject.toml").read_text())["project"]
        for package in DISTRIBUTIONS
    }
    version = metadata["rkgb"]["version"]
    for package, distribution in DISTRIBUTIONS.items():
        project = metadata[package]
        if project["name"] != distribution:
            yield f"{package}: the distribution is named {project['name']}, not {distribution}"
        if project["version"] != version:
            yield f"{package}: version {project['version']}, but rkgb has {version}"
        init = root / package / "src" / package / "__init__.py"
        written = re.search(r'^__version__\s*=\s*"(.*)"', init.read_text(), re.MULTILINE)
        if written and written[1] != version:
            yield f"{package}: __version__ is {written[1]}, the metadata says {version}"
        python = project.get("requires-python")
        if python != metadata["rkgb"].get("requires-python"):
            yield f"{package}: it needs Python {python}, but rkgb another one"
        pins = {pin for pin in project["dependencies"] if is_sibling(pin)}
        wanted = {f"{name}=={version}" for name in siblings_of(package)}
        if pins != wanted:
            yield f"{package}: sibling pins {sorted(pins)}, wanted {sorted(wanted)}"
    ruff = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["target-version"]
    if metadata["rkgb"].get("requires-python") != f">={ruff[2]}.{ruff[3:]}":
        yield f"pyproject.toml: ruff checks for {ruff}, but the packages say otherwise"
    for name in filter(lambda name: (root / name).exists(), SAYING_PYTHON):
        for least in re.findall(r"Python (3\.\d+) or newer", (root / name).read_text()):
            if metadata["rkgb"].get("requires-python") != f">={least}":
                yield f"{name}: Python {least}, but the packages say otherwise"
    citation = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if citation is None or citation[1].strip("\"'") != version:
        yield f"CITATION.cff: version {citation and citation[1]}, wanted {version}"
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None or newest[1] not in (version, "Unreleased"):
        yield f"CHANGELOG.md: newest entry {newest and newest[1]}, wanted {version} or Unreleased"


def is_sibling(requirement: str) -> bool:
    """Tell whether a requirement names one of the three distributions."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return name is not None and name[0].lower() in DISTRIBUTIONS.values()


def siblings_of(package: str) -> tuple[str, ...]:
    """Return the distributions that `package` depends on, of the three."""
    return ("rkgb", "rk-rotor") if package == "rockmate" else ()


def main() -> int:
    """Print what disagrees and return 1, or print the version and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    found = list(problems(root))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print("versions: all equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
