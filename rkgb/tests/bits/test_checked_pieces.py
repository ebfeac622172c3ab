"""The checker of programs follows pieces of rows: it accepts ours, and refuses every slip."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from oracles.check_pieces import check_pieces
from oracles.check_program import check_program
from rkgb.capture.record import make_B
from rkgb.errors import InvalidGraphError
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.rows import Cut, cut_in_rows
from rkgb.rows.call import InPieces, Line
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from rkgb.run.program.statements import Call
from zoo.heads import WIDTH, Block, Head, words

KINDS: dict[str, Any] = {
    "exact head": lambda: (Head().double(), words(1, 124), True),
    "blocks": lambda: (nn.Sequential(Block(), Block()), (torch.randn(2, 31, WIDTH),), False),
}


class Untried:
    """Takes all pieces for exact."""

    def __call__(self, *_: Any) -> bool:
        return True

    def of_series(self, *_: Any) -> bool:
        return True


def cut_graph(kind: str) -> SimplifiedGraph:
    """Return a graph with calls in pieces; exact ones are not tried here."""
    torch.manual_seed(0)
    model, inputs, is_exact = KINDS[kind]()
    same_bits = Untried() if is_exact else None
    how = Cut(8, is_exact=is_exact)
    cut = cut_in_rows(B_to_D(make_B(model, inputs)), how, same_bits)
    assert cut.nodes
    return runnable(cut.graph).graph


def calls_of(graph: SimplifiedGraph) -> list[InPieces]:
    ops = (op for node in graph.nodes for op in (*node.ops, *node.backward))
    return [op.target for op in ops if isinstance(op.target, InPieces)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_with_pieces_computes_what_was_recorded(kind: str) -> None:
    graph = cut_graph(kind)
    count = len(graph.nodes)
    steps = [*(("F", i) for i in range(count)), *(("B", i) for i in reversed(range(count)))]
    program = lower_step(graph, steps)
    check_program(graph, program)
    calls = [s for s in program.backward if isinstance(s, Call)]
    calls = [s for s in calls if isinstance(s.op.target, InPieces)]
    assert calls
    for call in calls:  # pieces that compute one operation less than they replace
        wrong = copy.copy(call.op.target)
        wrong.recorded = wrong.recorded[1:]
        changed = Call(replace(call.op, target=wrong))
        lines = tuple(changed if s is call else s for s in program.backward)
        with pytest.raises(InvalidGraphError):
            check_program(graph, replace(program, backward=lines))


def slips(call: InPieces) -> Iterator[tuple[str, InPieces]]:
    """Yield a call with every slip that a line can have."""

    def other(**changed: Any) -> InPieces:
        found = copy.copy(call)
        vars(found).update(changed)
        return found

    pieces = call.pieces
    yield "a piece is missing", other(pieces=replace(pieces, count=pieces.count - 1))
    yield "a piece too many", other(pieces=replace(pieces, count=pieces.count + 1))
    parts = ("before", "loop", "after") + (("short",) if call.short else ())
    for part in parts:
        lines: Sequence[Line] = getattr(call, part)
        for at, line in enumerate(lines):
            yield f"{part} without {line.op}", other(**{part: (*lines[:at], *lines[at + 1 :])})
            yield f"{part} twice {line.op}", other(**{part: (*lines[: at + 1], *lines[at:])})
            if line.frees:
                kept = (*lines[:at], replace(line, frees=()), *lines[at + 1 :])
                yield f"{line.op} keeps {line.frees}", other(**{part: kept})
            first = line.op.inputs[0]
            if part == "loop" and first not in (*line.frees, *call.pieces.takes):
                over = replace(line, into=first)
                changed = (*lines[:at], over, *lines[at + 1 :])
                yield f"{line.op} over what stays", other(loop=changed)
            early = tuple(name for name in line.op.inputs if name not in line.frees)
            if early:
                freed = replace(line, frees=(*line.frees, *early))
                yield (
                    f"{line.op} frees {early}",
                    other(**{part: (*lines[:at], freed, *lines[at + 1 :])}),
                )
    for at, line in enumerate(call.after):
        rest = (*call.after[:at], *call.after[at + 1 :])
        yield f"{line.op} before all pieces", other(after=rest, loop=(*call.loop, line))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slip_in_pieces_is_refused(kind: str) -> None:
    """A piece that is missing, added twice or read before it is there; freed early, or never."""
    count = 0
    for call in calls_of(cut_graph(kind)):
        check_pieces(call)
        for what, wrong in slips(call):
            count += 1
            try:
                check_pieces(wrong)
            except InvalidGraphError:
                continue
            pytest.fail(f"accepted: {what}")
    assert count > len(KINDS) * 10
