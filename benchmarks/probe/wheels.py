"""Wheels in a folder, for a machine that has torch already and no network.

Nothing is installed, and nothing changes there: a wheel is an archive, and Python finds what is in
it by PYTHONPATH. What no wheel brings comes from this checkout.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / name / "src" for name in ("rkgb", "rotor", "rockmate")]


def find_packages(wheels: Path | None) -> None:
    """Let this process, and those that it starts, find the packages of a folder of wheels first."""
    places = [] if wheels is None else [unpacked(wheels)]
    places += [*SOURCES, ROOT / "test_support"]
    sys.path[:0] = map(str, places)
    importlib.invalidate_caches()
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, places), *([known] if known else [])])


def unpacked(wheels: Path) -> Path:
    """Return where the wheels of a folder lie unpacked; those that are there stay.

    Raises:
        FileNotFoundError: there is no wheel in the folder.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise FileNotFoundError(f"no wheel in {wheels}; docs/how-to/gpu.md lists what to bring")
    into = wheels / "unpacked"
    for wheel in found:
        done = into / f".{wheel.stem}"
        if not done.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            done.touch()
    return into
