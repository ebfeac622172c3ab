"""The text of B, D and S of three small modules, kept in files so that a change is seen.

Rewrite the files after an intended change: python rkgb/tests/test_golden.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rkgb
from rkgb.testing import example

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("convolutional", "mixed", "averaging")


def text_of(name: str) -> str:
    model, sample = example(name)
    bg = rkgb.Btools.make_B(model, sample)
    dg = rkgb.Dtools.B_to_D(bg, model, sample)
    sg = rkgb.Stools.D_to_S(dg, model)
    parts = [f"=== {kind} ===\n{graph}\n" for kind, graph in (("B", bg), ("D", dg), ("S", sg))]
    # Lines move whenever a file is edited; that each operation has one is tested elsewhere.
    return re.sub(r"(\w+\.py):\d+", r"\1:N", "\n".join(parts))


@pytest.mark.parametrize("name", NAMES)
def test_graphs_print_as_they_did(name: str) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert text_of(name) == expected


def test_every_operation_has_a_source_line() -> None:
    for name in NAMES:
        model, sample = example(name)
        for op in rkgb.Btools.make_B(model, sample).ops:
            assert re.fullmatch(r"\w+\.py:\d+", op.source), op


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in NAMES:
        (GOLDEN / f"{each}.txt").write_text(text_of(each), encoding="utf-8")
