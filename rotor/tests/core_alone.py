"""Load the compiled core of an installed wheel without torch, and solve a chain with it.

What a build machine runs on each wheel: `python core_alone.py`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType


def load_core() -> ModuleType:
    """Return `rotor._core` alone: importing `rotor` would import torch."""
    package = importlib.util.find_spec("rotor")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(next(iter(package.submodule_search_locations)))
    endings = importlib.machinery.EXTENSION_SUFFIXES
    path = next(p for p in folder.glob("_core*") if p.name.removeprefix("_core") in endings)
    spec = importlib.util.spec_from_file_location("rotor._core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def main() -> None:
    """Solve a chain of four equal stages with much memory and with little."""
    option = (2, 1, 1, 3.0)  # saved, overheads; forward and backward together take 3 ms
    stage = (1, 1, 1, 1.0, [option])
    table = load_core().ChainTable([stage] * 4, 1, 40)
    table.fill()
    plain, least = table.makespan(40), table.makespan(table.smallest_slot)
    assert plain == 4 * 3.0, plain
    assert least > plain, (least, plain)
    assert len(table.ops(40)) == 8, "each stage forward and backward once"
    print(f"core: {plain} ms with room, {least} ms in {table.smallest_slot} slots")


if __name__ == "__main__":
    main()
