"""The simulation of many ranks: within its budget, less on each of more ranks, a table to read."""

from __future__ import annotations

from dataclasses import replace

import scale
from rockmate.planning import peak_of


def test_more_ranks_hold_less_and_recompute_less() -> None:
    size = scale.Size(4, 64, 4, 2, 128, 100, 64, 1)
    rates, recorded = scale.Rates(), scale.record(size, 16, cost="flops")
    parts = scale.parts_of(size, recorded, rates)
    many = [scale.Ranks(count, size, parts, rates) for count in scale.RANKS]
    held = [ranks.resident_bytes for ranks in many]
    assert held == sorted(held, reverse=True)
    assert all(h * r.count >= 16 * parts.parameters for h, r in zip(held, many, strict=True))
    keeping_all = peak_of(many[0].memory(), [0] * size.layers)
    least = scale.row_of(many[0])["smallest_budget_bytes"]
    assert isinstance(least, int)
    assert least < keeping_all
    room = held[0] + (least + keeping_all) // 2
    tight = [
        scale.row_of(scale.Ranks(r.count, replace(size, device_bytes=room), parts, rates))
        for r in many
    ]
    for row in tight:
        peak, budget = row["planned_peak_bytes"], row["budget_bytes"]
        assert isinstance(peak, int)
        assert isinstance(budget, int)
        assert peak <= budget
    extra = [row["extra_time"] for row in tight]
    assert extra[0] > 0  # type: ignore[operator]
    assert extra == sorted(extra, reverse=True)  # type: ignore[type-var]
    assert "| 512 |" in scale.table(tight, many[0], recorded, 1.0)
