"""The printed plan."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest

from rockmate.planners import plan
from rockmate.reports.plan_report import PlanReport
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.plan import make_plan
from rockmate.schedules.report import format_bytes, format_ms, format_plan, recomputed_rows
from rockmate.schedules.simulate import recompute_counts, simulate
from rockmate.schedules.steps import Step
from zoo.problems import gpt_problem


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.50 KiB"),
        (5 << 20, "5.00 MiB"),
        (1288490189, "1.20 GiB"),
        (3 << 41, "6144.00 GiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00 ms"), (0.0123, "12.3 us"), (1.5, "1.50 ms"), (123.4, "123 ms"), (2345, "2.35 s")],
)
def test_format_ms(value: float, text: str) -> None:
    assert format_ms(value) == text


def recompute_ops(problem, ops):
    """Steps that run every node of some operations again, right before the first backward."""
    again = tuple(Step("F", k) for k, node in enumerate(problem.nodes) if node.op in ops)
    steps = no_recomputation(problem)
    count = len(problem.nodes)
    return steps[:count] + again + steps[count:]


def test_repeated_layers_are_folded() -> None:
    problem = gpt_problem(12)
    rows = recomputed_rows(problem, recompute_ops(problem, {"gelu", "layer_norm"}))
    table = {(row.where, row.op): (row.nodes, row.runs) for row in rows}
    assert table == {
        ("blocks.{0..11}.mlp", "gelu"): (12, 12),
        ("blocks.{0..11}.ln1", "layer_norm"): (12, 12),
        ("blocks.{0..11}.ln2", "layer_norm"): (12, 12),
        ("head", "layer_norm"): (1, 1),
    }
    assert [row.total_ms for row in rows] == sorted((r.total_ms for r in rows), reverse=True)


def test_gaps_in_the_layers_are_spelled_out() -> None:
    problem = gpt_problem(8)
    again = [
        Step("F", k)
        for k, node in enumerate(problem.nodes)
        if node.op == "gelu" and node.module_path.split(".")[1] in "01345"
    ]
    steps = no_recomputation(problem)
    count = len(problem.nodes)
    (row,) = recomputed_rows(problem, steps[:count] + tuple(again) + steps[count:])
    assert row.where == "blocks.{0,1,3..5}.mlp"
    (single,) = recomputed_rows(problem, (*steps[:count], again[0], *steps[count:]))
    assert single.where == "blocks.0.mlp"


@pytest.mark.slow
def test_the_table() -> None:
    problem = gpt_problem(6)
    budget = int(0.6 * simulate(problem, no_recomputation(problem)).peak_bytes)
    found = plan(problem, budget, effort="fast")
    text = format_plan(problem, found)
    assert max(map(len, text.splitlines())) <= 100
    assert format_bytes(budget) in text
    assert format_bytes(found.peak_bytes) in text
    assert f"{100 * found.overhead:.2f} %" in text
    assert "above the optimum" in text
    assert found.planner in text
    counts = recompute_counts(problem, found.steps)
    printed = sum(row.runs for row in recomputed_rows(problem, found.steps))
    assert printed == sum(counts)


def test_no_recomputation_and_no_bound_are_said() -> None:
    problem = gpt_problem(1)
    steps = no_recomputation(problem)
    kept = make_plan(problem, steps, 1 << 40, "none")
    text = format_plan(problem, kept)
    assert "nothing" in text
    assert "no bound was computed" in text
    proven = dataclasses.replace(kept, bound_ms=kept.time_ms, status="optimal")
    assert "proven optimal" in format_plan(problem, proven)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_report_is_an_equal_report(way: Callable[[PlanReport], PlanReport]) -> None:
    problem = gpt_problem(1)
    report = PlanReport(problem, make_plan(problem, no_recomputation(problem), 1 << 40, "none"))
    found = way(report)
    assert type(found) is PlanReport
    assert found == report
    assert str(found) == str(report)
    assert found.peak_bytes == report.plan.peak_bytes


def test_a_report_has_the_attributes_of_its_plan_and_no_others() -> None:
    problem = gpt_problem(1)
    report = PlanReport(problem, make_plan(problem, no_recomputation(problem), 1 << 40, "none"))
    assert report.time_ms == report.plan.time_ms
    with pytest.raises(AttributeError, match="'Plan' object has no attribute 'cost'"):
        _ = report.cost
    with pytest.raises(AttributeError, match="'PlanReport' object has no attribute '__array__'"):
        _ = report.__array__
