"""A profiler sees each part of a planned step under the name that the program gives it."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from oracles.training import assert_trains_like, eager_copy
from rkgb.engine import trace_memory
from rockmate import Rockmate
from runs.planned import wrap

NAME = re.compile(r"([FB])(\d+)( again:)? (\S+) \((.*)\)")


@pytest.fixture(scope="module")
def made() -> tuple[Rockmate, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5)])
    twin, sample = eager_copy(model), torch.randn(32, 16)
    return wrap(model, sample, 0.7), twin, sample


@pytest.fixture
def planned(
    made: tuple[Rockmate, nn.Module, torch.Tensor],
) -> tuple[Rockmate, nn.Module, torch.Tensor]:
    for module in made[:2]:
        module.zero_grad()
    return made


def test_each_step_of_the_plan_is_a_span_with_its_module(
    planned: tuple[Rockmate, nn.Module, torch.Tensor],
) -> None:
    wrapped, _, sample = planned
    wrapped(sample).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        wrapped(sample).sum().backward()
    found = [match for e in profiler.events() if (match := NAME.fullmatch(e.name))]
    count = len(wrapped.plan.problem.nodes)
    ran = Counter((kind, int(node)) for kind, node, *_ in (m.groups() for m in found))
    planned_runs = Counter((step.kind, step.node) for step in wrapped.plan.steps)
    assert ran == planned_runs
    again = [m for m in found if m[3]]
    assert len(again) == len(wrapped.plan.steps) - count - len(wrapped.plan.problem.backward_order)
    assert again
    for match in found:
        assert match[5] == wrapped.plan.problem.nodes[int(match[2])].module_path
        assert match[0] in wrapped.plan.source()
    # Kernels lie inside the spans, so that a trace says which part of the step they belong to.
    kernels = [e for e in profiler.events() if e.name == "aten::addmm"]
    assert kernels
    for kernel in kernels:
        names = []
        while kernel is not None:
            names.append(kernel.name)
            kernel = kernel.cpu_parent
        assert sum(NAME.fullmatch(name) is not None for name in names) == 1


def test_profiled_steps_have_the_same_bits(
    planned: tuple[Rockmate, nn.Module, torch.Tensor],
) -> None:
    wrapped, twin, sample = planned
    with profile(activities=[ProfilerActivity.CPU]):
        assert_trains_like(wrapped, twin, sample)


def test_a_profiler_may_come_between_forward_and_backward(
    planned: tuple[Rockmate, nn.Module, torch.Tensor],
) -> None:
    wrapped, twin, sample = planned
    loss = wrapped(sample).sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    assert any(e.name.startswith("B0 ") for e in profiler.events())
    twin(sample).sum().backward()
    for ours, theirs in zip(wrapped.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_without_a_profiler_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr("rkgb.run.program.source._begun_span", refuse)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
    sample = torch.randn(32, 16)
    wrapped = wrap(model, sample, 0.7)
    wrapped(sample).sum().backward()
    assert "span" not in wrapped.plan.source()
    # The meter of memory is a profiler, too, and no user's.
    trace_memory(lambda _: wrapped(sample).sum().backward(), torch.device("cpu"))
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(AssertionError, match="a span was made"),
    ):
        wrapped(sample)
