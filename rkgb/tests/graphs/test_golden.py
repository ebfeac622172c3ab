"""The text of B, D and S of three small modules, with its backward, kept to see every change.

Rewrite the files after an intended change: PYTHONPATH=test_support python on this file.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rkgb
from zoo.examples import example

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("convolutional", "mixed", "averaging")


def text_of(name: str) -> str:
    model, sample = example(name)
    bg = rkgb.Btools.make_B(model, sample)
    dg = rkgb.Dtools.B_to_D(bg, model, sample)
    sg = rkgb.Stools.D_to_S(dg, model)
    texts = (("B", bg), ("D", dg), ("S", sg), ("backward of S", backward_of(sg)))
    parts = [f"=== {kind} ===\n{graph}\n" for kind, graph in texts]
    # Lines move whenever a file is edited; that each operation has one is tested elsewhere.
    return re.sub(r"(\w+\.py):\d+", r"\1:N", "\n".join(parts))


def backward_of(sg: rkgb.SimplifiedGraph) -> str:
    infos, lines = sg.infos, []
    for index in reversed(range(len(sg.nodes))):
        node = sg.nodes[index]
        if node.backward or node.hand_overs:
            lines.append(f"[{index}] {node.name}")
        for op in node.backward:
            roots = [infos[name].alias_of for name in op.results if name]
            shares = [root for root in roots if root not in op.results]
            lines.append(f"    {op}  # {infos[op.name]}{''.join(f' = {r}' for r in shares)}")
        lines += [f"    {given.leaf} += {given.value}" for given in node.hand_overs]
    return "\n".join(lines)


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
