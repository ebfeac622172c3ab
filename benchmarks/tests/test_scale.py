"""The simulation of many ranks: what a layer keeps by a formula, its FLOPs, and plans in bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import scale
from models.llama_rank import Llama
from rockmate.planning import peak_of

SMALL = Llama("small", 4, 256, 8, 4, 512, 512, 256)


@pytest.mark.parametrize("layout", [(64, 1, 1), (64, 4, 1), (64, 4, 2)])
def test_layers_keep_what_the_formula_says(layout: tuple[int, int, int]) -> None:
    step = scale.Step(SMALL, *layout, scale.Device())
    kept = SMALL.layers * step.parts.options[0].saved_bytes
    numbers = layout[2] * SMALL.tokens  # of float32, for the norms and for each head's attention
    beside = SMALL.layers * 4 * numbers * (2 + SMALL.heads) / layout[1]
    assert kept == pytest.approx(step.kept_by_formula + beside, rel=1e-3)
    assert min(o.saved_bytes for o in step.parts.options) == step.layer_input_bytes


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
