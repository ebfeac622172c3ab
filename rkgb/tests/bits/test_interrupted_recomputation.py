"""What is interrupted while random numbers are drawn again leaves the random stream as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rkgb.capture.record import make_B
from rkgb.elements.op import Op
from rkgb.engine import B_to_D, D_to_S, compile_step, lower_step, plain_callee, runnable
from rkgb.graphs.basic import external_values
from rkgb.run.program.places import Step
from rkgb.torch_api import straight_to_kernels


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_random_numbers_go_on_where_the_forward_has_ended(error: type[BaseException]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.GELU()), torch.randn(5, 6)
    graph = runnable(D_to_S(B_to_D(make_B(model, (x,))))).graph
    count = len(graph.nodes)
    forwards: list[Step] = [("F", k) for k in range(count)]
    backwards: list[Step] = [("B", k) for k in reversed(range(count))]
    calls: list[str] = []

    def callee(op: Op) -> Callable[..., Any]:
        plain = plain_callee(op)

        def drop(*args: Any, **kwargs: Any) -> Any:
            calls.append(op.target_name)
            if len(calls) == 2:  # the second time that it runs
                raise error("in a recomputation")
            return plain(*args, **kwargs)

        return drop if op.is_random else plain

    program = lower_step(graph, [*forwards, *forwards, *backwards])
    compiled = compile_step(graph, program, callee)
    external = external_values(graph.basic, model, (x,))
    with straight_to_kernels(), torch.no_grad():
        (y,), saved = compiled.forward([external[name] for name in program.externals])
        after_forward = torch.get_rng_state()
        with pytest.raises(error, match="in a recomputation"):
            next(compiled.backward(saved, [torch.ones_like(y)]))
    assert len(calls) == 2
    assert torch.equal(torch.get_rng_state(), after_forward)
