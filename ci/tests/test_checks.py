"""The checks of this folder can fail: each is run on a small tree with a planted mistake."""

from __future__ import annotations

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
        )
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
        ("rkgb/src/rkgb/api.py", "import rotor.chain", "api.py:1: rkgb must not import rotor"),
        ("rotor/src/rotor/a.py", "def f():\n    from rkgb import x", "a.py:2: rotor must not"),
        ("rotor/src/rotor/a.py", "import_module('rockmate')", ""),
        ("rotor/src/rotor/solver/dp.py", "import torch", "rotor's solver/dp.py must not import"),
        ("rkgb/src/rkgb/a.py", "def f():\n    import numpy", "a.py:2: rkgb does not declare numpy"),
        ("rockmate/src/rockmate/__init__.py", "import pulp", "import rockmate loads pulp"),
        ("rkgb/src/rkgb/__init__.py", "import graphviz", "import rockmate loads graphviz"),
        ("rkgb/src/rkgb/__init__.py", "import no_such_module", "import rkgb fails"),
    ],
)
def test_planted_import_is_found(tree: Path, path: str, code: str, message: str) -> None:
    for name in ("pulp", "graphviz"):  # stand-ins: the check must not need the libraries
        (tree / "rkgb" / "src" / f"{name}.py").write_text("")
    (tree / "rockmate/src/rockmate/__init__.py").write_text("import rkgb\n")
    if message == "":
        code, message = f"import importlib\nimportlib.{code}", "a.py:2: rotor must not import"
    (tree / path).parent.mkdir(exist_ok=True)
    (tree / path).write_text(code + "\n")
    status, text = check("check_imports.py", tree)
    assert status == 1
    assert message in text


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("rotor/pyproject.toml", '"1.2.3"', '"1.2.4"', "rotor: version 1.2.4"),
        ("rotor/pyproject.toml", "rk-rotor", "rotor", "the distribution is named rotor"),
        ("rockmate/pyproject.toml", "rkgb==1.2.3", "rkgb>=1.2.3", "rockmate: sibling pins"),
        ("rkgb/pyproject.toml", "[]", '["rk-rotor==1.2.3"]', "rkgb: sibling pins"),
        ("rkgb/src/rkgb/__init__.py", "1.2.3", "1.2.2", "rkgb: __version__ is 1.2.2"),
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
