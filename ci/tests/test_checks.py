"""The checks of this folder can fail: each is run on a small tree with a planted mistake."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent
PACKAGES = {"rkgb": "rkgb", "rotor": "rk-rotor", "rockmate": "rockmate"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a checkout of three empty packages that passes every check."""
    for package, distribution in PACKAGES.items():
        source = tmp_path / package / "src" / package
        source.mkdir(parents=True)
        (source / "__init__.py").write_text('__version__ = "1.2.3"\n')
        pins = '"rkgb==1.2.3", "rk-rotor==1.2.3"' if package == "rockmate" else ""
        (tmp_path / package / "pyproject.toml").write_text(
            f'[project]\nname = "{distribution}"\nversion = "1.2.3"\ndependencies = [{pins}]\n'
            'requires-python = ">=3.11"\n'
        )
    (tmp_path / "pyproject.toml").write_text('[tool.ruff]\ntarget-version = "py311"\n')
    (tmp_path / "README.md").write_text("It needs Python 3.11 or newer.\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n")
    return tmp_path


def check(script: str, tree: Path) -> tuple[int, str]:
    """Run one check on `tree`; return its exit status and everything it printed."""
    run = subprocess.run(
        [sys.executable, str(CI / script), "--root", str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize("script", ["check_imports.py", "check_versions.py"])
def test_correct_tree_passes(script: str, tree: Path) -> None:
    status, text = check(script, tree)
    assert status == 0, text


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (
            "rkgb/src/rkgb/api.py",
            "import rotor.schedules.chain",
            "api.py:1: rkgb must not import rotor",
        ),
        ("rotor/src/rotor/a.py", "def f():\n    from rkgb import x", "a.py:2: rotor must not"),
        ("rotor/src/rotor/a.py", "import_module('rockmate')", ""),
        ("rockmate/src/rockmate/module.py", "from zoo.nets import network", "does not declare"),
        ("rotor/src/rotor/solver/dp.py", "import torch", "rotor's solver.dp must not import"),
        ("rkgb/src/rkgb/a.py", "def f():\n    import numpy", "a.py:2: rkgb does not declare numpy"),
        ("rockmate/src/rockmate/__init__.py", "import matplotlib", "rockmate loads matplotlib"),
        ("rkgb/src/rkgb/__init__.py", "import graphviz", "import rockmate loads graphviz"),
        ("rkgb/src/rkgb/__init__.py", "import no_such_module", "import rkgb fails"),
    ],
)
def test_planted_import_is_found(tree: Path, path: str, code: str, message: str) -> None:
    for name in ("matplotlib", "graphviz"):  # stand-ins: the check must not need the libraries
        (tree / "rkgb" / "src" / f"{name}.py").write_text("")
    (tree / "rockmate/src/rockmate/__init__.py").write_text("import rkgb\n")
    if message == "":
        code, message = f"import importlib\nimportlib.{code}", "a.py:2: rotor must not import"
    (tree / path).parent.mkdir(exist_ok=True)
    (tree / path).write_text(code + "\n")
    status, text = check("check_imports.py", tree)
    assert status == 1
    assert message in text


# Planted (a file, its code, what the check says of it), several where it takes two.
MISPLACED = {
    "upwards": [("rkgb/graphs/a.py", "import rkgb.costs.b", "a.py:1: rkgb/graphs must not import")],
    "lazily": [("rkgb/graphs/a.py", "def f():\n    import rkgb.run.b", "a.py:2: rkgb/graphs must")],
    "for types": [
        (
            "rkgb/graphs/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rkgb.api import X",
            "a.py:3: rkgb/graphs must not import rkgb/api",
        )
    ],
    "relatively": [("rkgb/graphs/a.py", "from ..run import b", "a.py:1: rkgb/graphs must not")],
    "sideways": [("rkgb/capture/a.py", "import rkgb.run", "rkgb/capture must not import rkgb/run")],
    "of the face": [("rotor/solver/a.py", "from rotor import _core", "must not import rotor/__in")],
    "no layer": [("rotor/odd/a.py", "", "rotor/odd has no layer in ci/check_imports.py")],
    "circle": [
        ("rockmate/solvers/a.py", "import rockmate.solvers.b", "a circle of imports"),
        ("rockmate/solvers/b.py", "from rockmate.solvers import a", "rockmate.solvers.b"),
    ],
    "runtime": [
        ("rockmate/runtime/a.py", "import rockmate.planners.b", "must not import rockmate/")
    ],
    "door": [
        (
            "rockmate/runtime/a.py",
            "from rkgb.elements.op import Op",
            "a.py:1: rockmate must not import rkgb.elements.op, which is no door",
        )
    ],
    "not offered": [
        ("rkgb/engine.py", "__all__ = ['Op']", ""),
        (
            "rockmate/runtime/a.py",
            "from rkgb.engine import Op, helper",
            "a.py:1: rkgb.engine does not offer helper",
        ),
    ],
    "rotor knows nobody": [
        ("rotor/measure.py", "import rkgb.engine", "rotor must not import rkgb")
    ],
    "tensors": [("rockmate/planners/a.py", "import torch.nn", "planners.a must not import torch")],
    "tensors of rkgb": [
        ("rockmate/problems/a.py", "import rkgb.engine", "problems.a must not import rkgb")
    ],
    "tensors of a neighbour": [
        ("rockmate/planners/a.py", "import rockmate.runtime.b", "runtime, which may import torch")
    ],
    "private": [
        ("rkgb/graphs/a.py", "from rkgb.graphs.b import _c", "rkgb.graphs.b._c is private to its f")
    ],
    "private of torch": [
        (
            "rkgb/graphs/a.py",
            "from torch.utils import _pytree",
            "torch.utils._pytree belongs in rkgb",
        )
    ],
}


@pytest.mark.parametrize("planted", MISPLACED.values(), ids=MISPLACED)
def test_misplaced_import_is_found(tree: Path, planted: list[tuple[str, str, str]]) -> None:
    for path, code, _ in planted:
        package, _, rest = path.partition("/")
        file = tree / package / "src" / package / rest
        file.parent.mkdir(exist_ok=True)
        file.write_text(code + "\n")
    status, text = check("check_imports.py", tree)
    assert status == 1
    for _, _, message in planted:
        assert message in text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from rockmate.planning import plan", ""),
        ("from rockmate import Rockmate, planning", ""),
        ("from rockmate.planners import plan", "rockmate.planners, which is no door"),
        ("from harness import meter", ""),
        ("from harness.meter import _read", "harness.meter._read is private"),
        ("from torch.utils import _pytree", ""),  # measures what it likes
        ("import b", ""),  # one door may use another
    ],
)
def test_benchmarks_import_only_doors(tree: Path, code: str, message: str) -> None:
    (tree / "rockmate/src/rockmate/planning.py").write_text("__all__ = ['plan']\n")
    face = tree / "rockmate/src/rockmate/__init__.py"
    face.write_text("__all__ = ['Rockmate']\n")
    (tree / "benchmarks" / "harness").mkdir(parents=True)
    (tree / "benchmarks" / "harness" / "meter.py").write_text("_read = 1\n")
    (tree / "benchmarks" / "a.py").write_text(code + "\n")
    (tree / "benchmarks" / "b.py").write_text("")
    status, text = check("check_imports.py", tree)
    assert (status == 1) == bool(message), text
    assert message in text


def test_folders_of_benchmarks_have_layers(tree: Path) -> None:
    for name, code in {"harness": "import planning.a", "planning": "", "odd": ""}.items():
        (tree / "benchmarks" / name).mkdir(parents=True)
        (tree / "benchmarks" / name / "a.py").write_text(code + "\n")
    status, text = check("check_imports.py", tree)
    assert status == 1
    assert "harness/a.py:1: benchmarks/harness must not import benchmarks/planning" in text
    assert "benchmarks/odd has no layer" in text


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("rotor/pyproject.toml", '"1.2.3"', '"1.2.4"', "rotor: version 1.2.4"),
        ("rotor/pyproject.toml", "rk-rotor", "rotor", "the distribution is named rotor"),
        ("rockmate/pyproject.toml", "rkgb==1.2.3", "rkgb>=1.2.3", "rockmate: sibling pins"),
        ("rkgb/pyproject.toml", "[]", '["rk-rotor==1.2.3"]', "rkgb: sibling pins"),
        ("rkgb/src/rkgb/__init__.py", "1.2.3", "1.2.2", "rkgb: __version__ is 1.2.2"),
        ("rotor/pyproject.toml", "3.11", "3.10", "rotor: it needs Python >=3.10"),
        ("README.md", "3.11", "3.10", "README.md: Python 3.10"),
        ("pyproject.toml", "py311", "py310", "pyproject.toml: ruff checks for py310"),
        ("CITATION.cff", "1.2.3", "1.2.2", "CITATION.cff"),
        ("CHANGELOG.md", "1.2.3", "1.2.2", "CHANGELOG.md"),
    ],
)
def test_planted_version_is_found(tree: Path, path: str, old: str, new: str, message: str) -> None:
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new, 1))
    status, text = check("check_versions.py", tree)
    assert status == 1
    assert message in text


def test_readme_blocks_share_names_and_report_failures(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    skipped = "<!-- no-run: needs a GPU -->\n```python\nraise SystemExit(7)\n```\n"
    readme.write_text(f"```python\na = 1\n```\n{skipped}\n```python\nassert a == 1\n```\n")
    command = [sys.executable, str(CI / "run_readme.py"), str(readme)]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert "2 blocks run" in good.stdout
    readme.write_text("# Title\n\n```python\nassert 1 == 2\n```\n")
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert 'README.md", line 4' in bad.stderr


@pytest.mark.parametrize(
    ("said", "agrees"),
    [
        ("took 7 ms, 3 plans", True),
        ("took 12.5 ms, 3 plans", True),
        ("took 12.5 ms, 4 plans", False),
        ("took 7 ms", False),
    ],
)
def test_what_a_readme_shows_is_compared_but_for_measured_numbers(
    tmp_path: Path, said: str, agrees: bool
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        f"```python\nprint('took 7 ms, 3 plans')\n```\n\n```text\n{said}\n```\n", encoding="utf-8"
    )
    command = [sys.executable, str(CI / "run_readme.py")]
    run = subprocess.run([*command, str(readme)], capture_output=True, text=True, check=False)
    assert run.returncode == (not agrees)
    assert ("what it prints" in run.stderr) == (not agrees)
    subprocess.run([*command, "--write", str(readme)], capture_output=True, check=True)
    assert "```text\ntook 7 ms, 3 plans\n```" in readme.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ("", ""),
        ('<testcase name="a"><skipped type="pytest.skip" message="needs CUDA"/></testcase>', ""),
        ('<testcase name="a"><skipped type="pytest.skip" message="no browser"/></testcase>', ""),
        ('<testcase name="a"><skipped type="pytest.xfail" message="known"/></testcase>', ""),
        (
            '<testcase name="a"><skipped type="pytest.skip" message="no pulp"/></testcase>',
            "no pulp",
        ),
    ],
)
def test_unaccepted_skip_is_found(tmp_path: Path, skipped: str, message: str) -> None:
    report = tmp_path / "report.xml"
    ran = "".join(f'<testcase name="test_x[{name}]"/>' for name in ("cbc", "cp_sat", "highs"))
    report.write_text(f"<testsuite>{ran}{skipped}</testsuite>")
    command = [sys.executable, str(CI / "check_skips.py"), str(report)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == bool(message)
    assert message in run.stderr
    report.write_text('<testsuite><testcase name="test_x[cbc]"/></testsuite>')
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "no test of CP-SAT passed" in run.stderr


def test_every_folder_of_a_package_says_what_it_gets_and_gives() -> None:
    for package in PACKAGES:
        source = CI.parent / package / "src" / package
        for file in source.glob("*/**/__init__.py"):
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            assert len(text.splitlines()) >= 3, f"{file} says too little"


def test_every_test_of_rockmate_lies_in_the_folder_of_a_promise() -> None:
    tests = CI.parent / "rockmate" / "tests"
    names = [path.name for path in tests.rglob("test_*.py")]
    assert len(names) == len(set(names))
    assert not list(tests.glob("test_*.py"))


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("rkgb/src/rkgb/a.py", ["rkgb/tests/test_a.py", "rockmate/tests/bits/test_all.py"]),
        ("rkgb/src/rkgb/b.py", ["rkgb/tests/test_b.py", "rockmate/tests/bits/test_all.py"]),
        (
            "rkgb/src/rkgb/c.py",
            ["rkgb/tests/test_b.py", "rockmate/tests/bits/test_all.py", "rotor/tests/test_kit.py"],
        ),
        ("test_support/oracles/kit.py", ["rotor/tests/test_kit.py"]),
        ("rkgb/tests/test_b.py", ["rkgb/tests/test_b.py"]),
        ("rkgb/tests/golden/x.txt", ["rkgb/tests/test_a.py", "rkgb/tests/test_b.py"]),
        ("README.md", []),
    ],
)
def test_a_change_selects_the_tests_that_import_it(
    tree: Path, changed: str, selected: list[str]
) -> None:
    files = {
        "rkgb/src/rkgb/__init__.py": "from rkgb.a import A\nfrom rkgb.b import B\n",
        "rkgb/src/rkgb/a.py": "A = 1\n",
        "rkgb/src/rkgb/b.py": "def B():\n    from rkgb.c import C\n",
        "rkgb/src/rkgb/c.py": "C = 1\n",
        "rkgb/tests/test_a.py": "from rkgb import A\n",
        "rkgb/tests/test_b.py": "from rkgb import B\n",
        "rockmate/tests/bits/test_all.py": "import rkgb\n",
        "rotor/tests/test_kit.py": "from oracles.kit import hold\n",
        "test_support/oracles/kit.py": "from rkgb.c import C\n",
    }
    for name, code in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(code)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "first")):
        subprocess.run(["git", *identity, *words], cwd=tree, check=True)
    (tree / changed).parent.mkdir(exist_ok=True)
    with (tree / changed).open("a") as file:
        file.write("# changed\n")
    status, text = check("changed_tests.py", tree)
    assert status == 0, text
    assert text.split() == selected


def test_packages_of_another_environment_come_after_the_own(tmp_path: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own, editable = tmp_path / "own", tmp_path / "editable"
    other = tmp_path / "a b" / "lib" / version / "site-packages"
    for folder, name in ((own, "both"), (other, "both"), (other, "there"), (editable, "linked")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}_of_a_test.py").write_text(f"where = {folder.name!r}\n")
    (other / "link.pth").write_text(f"{editable}\n")
    command = [sys.executable, str(CI / "site_behind.py"), "--into", str(own)]
    subprocess.run([*command, str(tmp_path / "a b")], check=True)
    code = f"import site; site.addsitedir({str(own)!r})\n" + "".join(
        f"import {name}_of_a_test as m; print(m.where)\n" for name in ("both", "there", "linked")
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["own", "site-packages", "editable"]
    refused = subprocess.run([*command, str(own)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"has no packages for {version}" in refused.stderr
