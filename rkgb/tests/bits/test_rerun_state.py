"""What a recomputation reads of memory that forwards write to: copies, and programs that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from oracles.check_program import check_program
from rkgb.capture.record import make_B
from rkgb.elements.op import renamed
from rkgb.errors import InvalidGraphError
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import Step, lower_step
from rkgb.run.program.state import rerun_state, runs_once
from rkgb.run.program.statements import Call, Copy, Drop, Statement


class Averages(nn.Module):
    """Writes a mean by `out=`, and reads what that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x.detach(), 0, out=self.mean)
        return torch.tanh(torch.tanh(x - mean) * x) + mean


class Overlaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.table[0], self.table[1]
        y = torch.tanh(x * second)
        return torch.tanh(x * first.mul_(second)) + y


def _graph(model: nn.Module, x: Tensor) -> SimplifiedGraph:
    return runnable(D_to_S(B_to_D(make_B(model, x)))).graph


def _all_again(graph: SimplifiedGraph) -> list[Step]:
    count = len(graph.nodes)
    again: list[Step] = [("F", k) for k in range(count)]
    backs: list[Step] = [("B", k) for k in reversed(range(count)) if graph.nodes[k].backward]
    return [*again, *again, *backs]


def test_a_program_that_reads_a_buffer_again_is_refused() -> None:
    graph = _graph(Averages(), torch.randn(3, 4, requires_grad=True))
    program = lower_step(graph, _all_again(graph))
    check_program(graph, program)
    copies = {s.name: s.source for s in program.forward if isinstance(s, Copy)}
    assert copies

    def reading(statement: Statement) -> list[Statement]:
        if isinstance(statement, Copy):
            return []
        if isinstance(statement, Drop):
            names = tuple(name for name in statement.names if name not in copies)
            return [Drop(names)] if names else []
        if isinstance(statement, Call):
            return [
                replace(statement, op=renamed(statement.op, lambda name: copies.get(name, name)))
            ]
        return [statement]

    saved = [copies.get(name, name) for name in program.saved]
    wrong = replace(
        program,
        forward=tuple(line for s in program.forward for line in reading(s)),
        backward=tuple(line for s in program.backward for line in reading(s)),
        saved=tuple(dict.fromkeys(saved)),
    )
    with pytest.raises(InvalidGraphError):
        check_program(graph, wrong)
    lasting = replace(  # what is read stays until then, so that nothing else is wrong
        wrong,
        forward=tuple(
            replace(s, names=tuple(n for n in s.names if n not in saved))
            if isinstance(s, Drop)
            else s
            for s in wrong.forward
        ),
    )
    with pytest.raises(InvalidGraphError, match="another forward may have written to"):
        check_program(graph, lasting)


def test_a_node_that_no_copy_can_serve_runs_once() -> None:
    graph = _graph(Overlaps(), torch.randn(2, 4, requires_grad=True))
    once = [k for k, node in enumerate(graph.nodes) if runs_once(graph, node)]
    assert once
    assert all(len(rerun_state(graph, graph.nodes[k])) > 1 for k in once)
    with pytest.raises(InvalidGraphError, match="no copy can stand for"):
        lower_step(graph, _all_again(graph))
