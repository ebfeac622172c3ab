"""Check which package imports which, and what importing a package must not load.

Four rules, each reported with file and line:

* direction: rkgb and rotor know neither each other nor rockmate;
* rotor's data types and solvers are plain Python: they do not import torch;
* what a package imports, its pyproject.toml declares, as a dependency or in an extra: that another
  dependency happens to bring it along is no promise;
* `import rockmate` (which loads all three) loads no optional or slow library: those are imported
  where they are used.

    $ python ci/check_imports.py
    imports: 41 files, 3 packages: fine
    $ python ci/check_imports.py        # after a mistake
    rkgb/src/rkgb/api.py:12: rkgb must not import rotor
    import rockmate loads ortools, which must wait until it is used
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

FORBIDDEN = {
    "rkgb": {"rotor", "rockmate"},
    "rotor": {"rkgb", "rockmate"},
    "rockmate": set[str](),
}
TORCH_FREE = ("chain.py", "ops.py", "schedule.py", "simulate.py", "errors.py", "solver/*.py")
DISTRIBUTIONS = {"rotor": "rk-rotor"}  # where the import has another name
LAZY = ("graphviz", "gurobipy", "highspy", "matplotlib", "ortools", "pulp", "transformers")


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level module) for every absolute import, those in functions included."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name.split(".")[0]
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.split(".")[0]
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module.split(".")[0]


def wrong_directions(root: Path) -> Iterator[str]:
    """Yield one line per import that breaks a direction."""
    for package, forbidden in FORBIDDEN.items():
        folder = root / package / "src" / package
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            banned = set(forbidden)
            if package == "rotor" and any(relative.match(pattern) for pattern in TORCH_FREE):
                banned.add("torch")
            for line, module in imported_modules(path.read_text(encoding="utf-8")):
                if module in banned:
                    name = f"rotor's {relative}" if module == "torch" else package
                    yield f"{path.relative_to(root)}:{line}: {name} must not import {module}"


def undeclared_imports(root: Path) -> Iterator[str]:
    """Yield one line per import of a library that the package does not declare."""
    for package in FORBIDDEN:
        project = tomllib.loads((root / package / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        declared = {
            re.split(r"[^\w.-]", line)[0].lower()
            for line in itertools.chain(project.get("dependencies", ()), *extras)
        }
        for path in sorted((root / package / "src" / package).rglob("*.py")):
            for line, module in imported_modules(path.read_text(encoding="utf-8")):
                name = DISTRIBUTIONS.get(module, module)
                if module == package or module in sys.stdlib_module_names or name in declared:
                    continue
                if module in FORBIDDEN.get(package, ()):
                    continue  # a wrong direction, reported as such
                yield f"{path.relative_to(root)}:{line}: {package} does not declare {name}"


def heavy_imports(root: Path) -> Iterator[str]:
    """Yield one line per package whose import, in a fresh interpreter, fails or loads too much."""
    sources = os.pathsep.join(str(root / package / "src") for package in FORBIDDEN)
    code = "import sys, importlib; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    for package in FORBIDDEN:
        run = subprocess.run(
            [sys.executable, "-c", code, package],
            env={**os.environ, "PYTHONPATH": sources},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            yield f"import {package} fails:\n{run.stderr.strip()}"
            continue
        for module in sorted(set(LAZY) & set(run.stdout.split())):
            yield f"import {package} loads {module}, which must wait until it is used"


def main() -> int:
    """Print what is wrong and return 1, or print how much was looked at and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    problems = [*wrong_directions(root), *undeclared_imports(root), *heavy_imports(root)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        count = sum(1 for package in FORBIDDEN for _ in (root / package / "src").rglob("*.py"))
        print(f"imports: {count} files, {len(FORBIDDEN)} packages: fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
