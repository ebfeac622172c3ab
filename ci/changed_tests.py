"""Print the test files that a change can break: those that import, in the end, a changed file.

    $ python ci/changed_tests.py               # what differs from main, uncommitted files too
    $ python ci/changed_tests.py --since HEAD~3

A name that a door such as `rkgb/__init__.py` passes on counts as an import of the file that it
comes from, so a change in one part of a package does not run the tests of all others. Files that
every test depends on (`EVERYTHING`) select all test files. Any other file that tests may read (the
C++ core, a golden text, a helper of tests) selects the tests of its own folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from check_imports import LAYERS, File, Import, files_of, read_file, target_of, with_scripts

EVERYTHING = ("pyproject.toml", "conftest.py", "constraints.txt")
NO_CODE = (".md", ".png", ".csv", ".svg")


def git(root: Path, *words: str) -> list[str]:
    """Return the lines that git prints."""
    run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def changed_files(root: Path, since: str) -> set[str]:
    """Return the files that differ from where this branch left `since`, new ones too."""
    base = git(root, "merge-base", since, "HEAD")[0]
    new = git(root, "ls-files", "--others", "--exclude-standard")
    return {*git(root, "diff", "--name-only", base), *new}


def origin(made: Import, files: Mapping[str, File]) -> tuple[str, bool]:
    """Return the module that an import needs, and whether with all that it imports itself.

    Through a door, `from rkgb import KGraph` needs the file that defines KGraph.
    """
    target = target_of(made, files)
    if target != made.module or not made.name or target not in files:
        return target, True
    for passed_on in files[target].imports:
        if passed_on.name == made.name:
            return origin(passed_on, files)
    return target, True


def affected(files: Mapping[str, File], changed: Iterable[str]) -> set[str]:
    """Return the modules that import a changed one, in the end."""
    users: dict[str, set[str]] = {}
    for file in files.values():
        for made in file.imports:
            users.setdefault(origin(made, files)[0], set()).add(file.module)
    found = set(changed)
    todo = list(found)
    while todo:
        for user in users.get(todo.pop(), ()):
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def selected(root: Path, changed: set[str]) -> list[str]:
    """Return the test files to run, by path."""
    tests = sorted(
        path for part in (*LAYERS, "ci") for path in (root / part / "tests").rglob("test_*.py")
    )
    if any(name in changed for name in EVERYTHING):
        return [str(path.relative_to(root)) for path in tests]
    files: dict[str, File] = {}
    for package in LAYERS:
        files |= files_of(root, package)
    by_path = {str(file.path.relative_to(root)): module for module, file in files.items()}
    for path in tests:
        file = with_scripts(read_file(path, f"test:{path.relative_to(root)}"), root)
        files[file.module] = file
    hit = affected(files, (by_path[name] for name in changed if name in by_path))
    other = {
        name.split("/")[0]
        for name in changed
        if name not in by_path and "/test_" not in name and not name.endswith(NO_CODE)
    }
    result = []
    for path in tests:
        name = str(path.relative_to(root))
        if f"test:{name}" in hit or name in changed or name.split("/")[0] in other:
            result.append(name)
    return result


def main() -> int:
    """Print the test files, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default="main")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    flags = parser.parse_args()
    root = flags.root.resolve()
    print("\n".join(selected(root, changed_files(root, flags.since))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
