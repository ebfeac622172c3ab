"""The simulation of many ranks: what a layer keeps by a formula, its FLOPs, and plans in bounds."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

import scale
from models.llama_rank import Llama
from rockmate.planning import peak_of, smallest_budget

SMALL = Llama("small", 4, 256, 8, 4, 512, 512, 256)
LONG = Llama("long", 4, 1024, 8, 4, 2048, 16384, 1024)  # the head is wide, numbers for a row few


@pytest.mark.parametrize("layout", [(64, 1, 1), (64, 4, 1), (64, 4, 2)])
def test_layers_keep_what_the_formula_says(layout: tuple[int, int, int]) -> None:
    step = scale.Step(SMALL, *layout, scale.Device())
    kept = SMALL.layers * step.parts.options[0].saved_bytes
    numbers = layout[2] * SMALL.tokens  # of float32, for the norms and for each head's attention
    beside = SMALL.layers * 4 * numbers * (2 + SMALL.heads) / layout[1]
    assert kept == pytest.approx(step.by_formula.kept_bytes + beside, rel=1e-3)
    assert min(o.saved_bytes for o in step.parts.options) == step.by_formula.layer_input_bytes


@pytest.mark.parametrize("layout", [(64, 1, 1), (64, 4, 1), (64, 4, 2)])
def test_bytes_and_times_are_those_of_formulas(layout: tuple[int, int, int]) -> None:
    step = scale.Step(LONG, *layout, scale.Device())
    memory, known = step.memory(), step.by_formula
    kept, least = peak_of(memory, [0] * LONG.layers), smallest_budget(memory)
    assert kept == pytest.approx(known.keeping_all_bytes, rel=0.02)
    assert least == pytest.approx(known.smallest_bytes, rel=0.02)
    times = step.forward_ms[0], step.backward_ms[0]
    assert times == pytest.approx(step.ms_by_formula, rel=0.02)


def test_the_rows_of_the_page_are_near_their_formulas() -> None:
    with (scale.RESULTS / "scale.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(scale.LAYOUTS) * len(scale.LLAMAS)
    for row in rows:
        for name in ("kept_bytes", "keeping_all_bytes", "smallest_budget_bytes"):
            formula = float(row[name.replace("_bytes", "_by_formula_bytes")])
            assert float(row[name]) == pytest.approx(formula, rel=0.01)
        for name in ("forward", "backward"):
            formula = float(row[f"{name}_by_formula_ms"])
            assert float(row[f"{name}_ms"]) == pytest.approx(formula, rel=0.01)


def test_times_are_flops_of_the_device() -> None:
    """Without a price for bytes, a layer takes 2 FLOPs for each weight and token, and attention."""
    free = replace(scale.Device(), memory_bytes_per_ms=float("inf"))
    step = scale.Step(SMALL, 64, 1, 1, free)
    tokens, norms = SMALL.tokens, 2 * SMALL.width
    products = 2 * tokens * (SMALL.layer_parameters - norms)
    attention = 2 * tokens * tokens * SMALL.width
    assert step.parts.forward * 1e9 == pytest.approx(products + attention, rel=1e-3)
    assert step.parts.backward * 1e9 == pytest.approx(2 * products + 2.5 * attention, rel=1e-3)


def test_more_ranks_hold_less_and_recompute_less() -> None:
    many = [scale.Step(SMALL, ranks, 1, 1, scale.Device()) for ranks in (8, 64, 512)]
    held = [step.resident_bytes for step in many]
    assert held == sorted(held, reverse=True)
    memory = many[0].memory()
    keeping_all, least = peak_of(memory, [0] * 4), scale.row_of(many[0])["smallest_budget_bytes"]
    assert isinstance(least, int)
    assert least < keeping_all
    device = scale.Device(held[0] + (least + keeping_all) // 2)
    tight = [scale.row_of(replace(step, device=device)) for step in many]
    for row in tight:
        peak, budget = row["planned_peak_bytes"], row["budget_bytes"]
        assert isinstance(peak, int)
        assert isinstance(budget, int)
        assert peak <= budget
    extra = [row["extra_computing"] for row in tight]
    everything = device.ms(4 * many[0].parts.forward) / many[0].computing_ms()
    assert extra[0] < everything  # type: ignore[operator]
    assert extra[0] > 0  # type: ignore[operator]
    assert extra == sorted(extra, reverse=True)  # type: ignore[type-var]
    assert "| small | 512, 1, 1 |" in scale.page(tight, [SMALL], device)


def test_a_layer_that_waits_for_links_recomputes_for_nothing() -> None:
    slow = scale.Step(SMALL, 64, 1, 1, replace(scale.Device(), network_bytes_per_ms=1.0))
    fast = replace(slow, device=replace(slow.device, network_bytes_per_ms=float("inf")))
    again = [slow.parts.forward] * SMALL.layers
    nothing = [0.0] * SMALL.layers
    assert slow.seen_ms(again) == slow.seen_ms(nothing)
    more_ms = fast.device.ms(sum(again))
    assert fast.seen_ms(again) - fast.seen_ms(nothing) == pytest.approx(more_ms)
    assert fast.seen_ms(nothing) == pytest.approx(fast.computing_ms())
