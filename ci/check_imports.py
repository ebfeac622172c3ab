"""Check which file imports which, and what importing a package must not load.

Imports inside functions and those for types only count like all others. Each rule reports the file
and the line:

* layers: a folder, or a file on top of a package, imports only from layers below it (`LAYERS`), and
  no files of a package import each other in a circle;
* doors: a package imports of another one only the modules that `DOORS` lists, and of those only
  what their `__all__` names;
* no tensors: what plans (`TORCH_FREE`) imports neither torch nor a file that may import it;
* private names: no `_name` is imported from another file of ours, and the private modules of torch
  are imported by one folder only;
* declared: what a package imports, its pyproject.toml declares, as a dependency or in an extra:
  that another dependency happens to bring it along is no promise;
* light: `import rockmate` (which loads all three) loads no optional or slow library.

    $ python ci/check_imports.py
    imports: 41 files, 3 packages: fine
    $ python ci/check_imports.py        # after a mistake
    rkgb/src/rkgb/api.py:12: rkgb must not import rotor
    import rockmate loads ortools, which must wait until it is used
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

# Folders and top files of each package, lowest first. A layer imports only layers above it in this
# list; what stands in one line does not import each other.
LAYERS = {
    "rkgb": (
        "errors",
        "torch_api",
        "device",
        "elements",
        "copies",
        "guards",
        "outside",
        "module_state",
        "graphs",
        "recording",
        "safeguards",
        "opaque",
        "capture run",
        "compiled",
        "costs",
        "rows",
        "atlas",
        "pictures",
        "api engine",
        "published",
        "__init__",
    ),
    "rotor": (
        "errors _core",
        "schedules",
        "runtime",
        "solver limit",
        "strategies",
        "planning",
        "checkpointable models",
        "__init__",
    ),
    "rockmate": (
        "errors parallel progress",
        "problems",
        "schedules",
        "files",
        "solvers guards",
        "runtime",
        "options",
        "planners comparison whole_step",
        "reports settings",
        "arguments",
        "networks",
        "planning requests",
        "estimate calls",
        "blockwise",
        "decisions",
        "module",
        "in_place",
        "block_by_block",
        "command",
        "__main__",
        "__init__",
        "integrations",
    ),
    # Folders of scripts: files on top are doors, above all folders.
    "benchmarks": (
        "models",
        "harness",
        "measures",
        "planning probe public_graphs steps",
        "figures reports",
        "graphs",
    ),
    # What only tests use: it may look into every package, and no package imports it.
    "test_support": ("fake_cuda zoo", "oracles", "runs", "fuzz"),
}
SCRIPTS = ("benchmarks", "test_support")  # their folders are imported by their own names
DOOR_LAYER = 1000  # of the files on top of a folder of scripts, and of its tests
# What others may import of a package; a package that is missing here knows no other.
# Each stage of rkgb is a door, for the names in `__all__` of its `__init__.py`.
RKGB_STAGES = (
    *("rkgb.torch_api", "rkgb.device", "rkgb.elements", "rkgb.copies", "rkgb.guards"),
    *("rkgb.outside", "rkgb.module_state", "rkgb.graphs", "rkgb.opaque"),
    *("rkgb.recording", "rkgb.safeguards", "rkgb.capture", "rkgb.run", "rkgb.compiled"),
    "rkgb.rows",
    "rkgb.costs",
)
DOORS = {
    "rockmate": ("rkgb", "rkgb.engine", "rkgb.errors", *RKGB_STAGES, "rotor"),
    "benchmarks": (
        "rkgb",
        "rkgb.engine",
        *RKGB_STAGES,
        "rkgb.published.check",
        "rotor",
        "rotor.models.densenet",
        "rotor.solver.table",
        "rockmate",
        "rockmate.planning",
        "rockmate.whole_step",
    ),
}
TORCH_FREE = {
    "rotor": ("schedules", "errors", "solver", "strategies", "_core"),
    "rockmate": (
        "errors",
        "parallel",
        "progress",
        "problems",
        "schedules",
        "files",
        "solvers",
        "options",
        "planners",
        "reports",
        "settings",
        "planning",
    ),
}
TORCH_PRIVATE = "rkgb/src/rkgb/torch_api/private"  # the one folder that may import torch._x
DISTRIBUTIONS = {"rotor": "rk-rotor"}  # where the import has another name
LAZY = (
    *("graphviz", "gurobipy", "highspy", "lightning", "matplotlib", "ortools"),
    *("transformers", "torch._inductor"),
)
PACKAGES = ("rkgb", "rotor", "rockmate")


@dataclass(frozen=True)
class Import:
    """One module or name that a line imports: `from module import name`, or `import module`."""

    line: int
    module: str
    name: str = ""

    @property
    def package(self) -> str:
        """The top-level package that it comes from."""
        return self.module.split(".")[0]


@dataclass(frozen=True)
class File:
    """A Python file: where it is, the name of its module, and what it imports."""

    path: Path
    module: str
    imports: tuple[Import, ...]
    public: frozenset[str] | None  # its `__all__`; None if it has none

    @property
    def unit(self) -> str:
        """The folder of its package that it lies in, or its own name if it lies on top."""
        return self.module.split(".")[1] if "." in self.module else "__init__"


def imports_of(tree: ast.Module, package: list[str]) -> Iterator[Import]:
    """Yield every import of a file whose folder is the package with this dotted name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(node.lineno, alias.name)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    yield Import(node.lineno, base, alias.name)
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(node.lineno, module)


def public_names(tree: ast.Module) -> frozenset[str] | None:
    """Return what a file's `__all__` lists, or None."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return frozenset(ast.literal_eval(value))
    return None


def read_file(path: Path, module: str) -> File:
    """Read the imports of one file; `module` is its dotted name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module.split(".")
    if path.stem != "__init__":
        package = package[:-1]
    return File(path, module, tuple(imports_of(tree, package)), public_names(tree))


def files_of(root: Path, package: str) -> dict[str, File]:
    """Return the files of a package by the name of their module.

    Scripts import each other by the names of their folders; here they are named as if `benchmarks`
    and `test_support` were packages.
    """
    folder = root / package if package in SCRIPTS else root / package / "src" / package
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[module] = read_file(path, module)
    if package in SCRIPTS:
        found = {module: with_scripts(file, root) for module, file in found.items()}
    return found


def with_scripts(file: File, root: Path) -> File:
    """Return a file whose imports of scripts begin with the folder that these lie in."""
    owners = {path.stem: owner for owner in SCRIPTS for path in (root / owner).glob("*")}
    imports = tuple(
        replace(made, module=f"{owners[made.package]}.{made.module}")
        if made.package in owners
        else made
        for made in file.imports
    )
    return replace(file, imports=imports)


def target_of(made: Import, files: Mapping[str, File]) -> str:
    """Return the module that an import reads: `a.b` for `from a import b` if that is a file."""
    inner = f"{made.module}.{made.name}"
    return inner if made.name and inner in files else made.module


def wrong_layers(files: Mapping[str, File], package: str) -> Iterator[tuple[File, int, str]]:
    """Yield what one package imports of itself against its layers, or in a circle."""
    layer_of = {unit: i for i, line in enumerate(LAYERS[package]) for unit in line.split()}
    if package in SCRIPTS:
        doors = {file.unit for file in files.values() if file.path.parent.name == package}
        layer_of |= dict.fromkeys((*doors, "tests"), DOOR_LAYER)
    graph: dict[str, set[str]] = {}
    for file in files.values():
        if file.unit not in layer_of:
            yield file, 1, f"{package}/{file.unit} has no layer in ci/check_imports.py"
            continue
        graph[file.module] = set()
        for made in file.imports:
            if made.package != package:
                continue
            target = target_of(made, files)
            unit = target.split(".")[1] if "." in target else "__init__"
            if target in files and target != file.module:
                graph[file.module].add(target)
            among_doors = layer_of[file.unit] == DOOR_LAYER
            upwards = layer_of.get(unit, 0) >= layer_of[file.unit] and not among_doors
            if unit != file.unit and upwards:
                yield file, made.line, f"{package}/{file.unit} must not import {package}/{unit}"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        yield files[circle[0]], 1, f"a circle of imports: {' <- '.join(circle)}"


def wrong_doors(
    file: File, owner: str, known: Mapping[str, Mapping[str, File]]
) -> Iterator[tuple[File, int, str]]:
    """Yield what a file of `owner` imports of other packages beside their doors."""
    doors = DOORS.get(owner, ())
    if owner == "test_support":
        return
    for made in file.imports:
        if made.package not in PACKAGES or made.package == owner:
            continue
        files = known[made.package]
        target = target_of(made, files)
        if not any(door.split(".")[0] == made.package for door in doors):
            yield file, made.line, f"{owner} must not import {made.package}"
        elif target in doors and target != made.module:
            continue  # a door by itself, such as `from rockmate import planning`
        elif made.module not in doors:
            yield file, made.line, f"{owner} must not import {target}, which is no door"
        elif made.name and not made.name.startswith("__"):
            public = files[made.module].public if made.module in files else None
            if public is not None and made.name not in public:
                yield file, made.line, f"{made.module} does not offer {made.name}"


def tensors_where_plans_are_made(
    file: File, owner: str, files: Mapping[str, File]
) -> Iterator[tuple[File, int, str]]:
    """Yield what a file that must not see tensors imports of torch, or of files that may see it."""
    free = TORCH_FREE.get(owner, ())
    if file.unit not in free:
        return
    name = f"{owner}'s {file.module.removeprefix(owner + '.')}"
    for made in file.imports:
        unit = target_of(made, files).split(".")[1:2]
        if made.package in ("torch", "rkgb") and made.module != "rkgb.errors":
            yield file, made.line, f"{name} must not import {made.package}"
        elif made.package == owner and unit and unit[0] not in free:
            yield file, made.line, f"{name} must not import {unit[0]}, which may import torch"


def private_names(file: File, root: Path) -> Iterator[tuple[File, int, str]]:
    """Yield the private names that a file imports of other files of ours, or of torch."""
    in_a_package = file.path.relative_to(root).parts[0] in PACKAGES
    for made in file.imports:
        name = made.name or made.module.split(".")[-1]
        private = name.startswith("_") and not name.startswith("__")
        ours = made.package in (*PACKAGES, *SCRIPTS)
        if private and ours and made.name:
            yield file, made.line, f"{made.module}.{made.name} is private to its file"
        parts = [*made.module.split("."), name]
        torchs = made.package == "torch" and any(
            part.startswith("_") and not part.startswith("__") for part in parts
        )
        if torchs and in_a_package and file.path.parent != root / TORCH_PRIVATE:
            yield file, made.line, f"torch's {made.module}.{name} belongs in {TORCH_PRIVATE}"


def wrong_imports(root: Path) -> Iterator[str]:
    """Yield one line per import that breaks a rule on who imports whom."""
    known = {package: files_of(root, package) for package in LAYERS}
    found: list[tuple[File, int, str]] = []
    for package, files in known.items():
        found += wrong_layers(files, package)
        for file in files.values():
            found += wrong_doors(file, package, known)
            found += tensors_where_plans_are_made(file, package, files)
            found += private_names(file, root)
    for file, line, text in dict.fromkeys(found):
        yield f"{file.path.relative_to(root)}:{line}: {text}"


def undeclared_imports(root: Path) -> Iterator[str]:
    """Yield one line per import of a library that the package does not declare."""
    for package in PACKAGES:
        project = tomllib.loads((root / package / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        declared = {
            re.split(r"[^\w.-]", line)[0].lower()
            for line in itertools.chain(project.get("dependencies", ()), *extras)
        }
        for file in files_of(root, package).values():
            for made in file.imports:
                name = DISTRIBUTIONS.get(made.package, made.package)
                if made.package == package or made.package in sys.stdlib_module_names:
                    continue
                if name not in declared and (made.package not in PACKAGES or package in DOORS):
                    where = file.path.relative_to(root)
                    yield f"{where}:{made.line}: {package} does not declare {name}"


def heavy_imports(root: Path) -> Iterator[str]:
    """Yield one line per package whose import, in a fresh interpreter, fails or loads too much."""
    sources = os.pathsep.join(str(root / package / "src") for package in PACKAGES)
    code = "import sys, importlib; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    for package in PACKAGES:
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
    root = parser.parse_args().root.resolve()
    problems = [*wrong_imports(root), *undeclared_imports(root), *heavy_imports(root)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        count = sum(len(files_of(root, package)) for package in PACKAGES)
        print(f"imports: {count} files, {len(PACKAGES)} packages: fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
