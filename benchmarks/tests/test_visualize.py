"""Figures are drawn from rows alone, and no text covers another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import visualize
from figures import style
from harness import experiment
from harness.experiment import Table
from harness.points import CURVE_COLUMNS, POINT_COLUMNS, RESULT_COLUMNS, STAMP_COLUMNS, Row
from reports import tables
from steps.cases import subjects

COLUMNS = (*POINT_COLUMNS, *RESULT_COLUMNS, *CURVE_COLUMNS, *STAMP_COLUMNS)
STRATEGIES = ("plain", "rockmate", "rotor", "checkpoint", "selective", "compile", "compile-aot")


def row(table: str, network: str, strategy: str, budget: str = "", **values: object) -> Row:
    known = {
        "experiment": table,
        "network": network,
        "size": "cpu",
        "batch": 4,
        "strategy": strategy,
        "budget": budget,
        "seed": 0,
        "status": "ok",
        "device": "cpu (x86_64)",
        "threads": 2,
        "torch": "2.13.0+cpu",
        "commit": "0123abc",
        "plain_peak_bytes": 2**27,
    }
    return {key: str(value) for key, value in {**known, **values}.items()}


def rows_of(table: str) -> list[Row]:
    """Return rows like those of a run, with every status that the figure shows."""
    made = []
    if table in ("performance", "compiled"):
        for network, (i, strategy) in itertools.product(style.TITLES, enumerate(STRATEGIES)):
            for share in (0.35, 0.5, 0.7):
                ratio = 1.9 - share + 0.07 * i
                times = {"time_ratio": ratio, "time_ratio_low": ratio - 0.05}
                peak = int(2**27 * share)
                made.append(
                    row(table, network, strategy, f"{share}", peak_bytes=peak, **times)
                    | {"time_ratio_high": f"{ratio + 0.1}"}
                )
        made.append(row(table, "unet", "rotor", "1%", status="refused"))
    elif table == "planning":
        networks = [*(f"gpt2:{n}" for n in (2, 4, 6, 8, 10, 12, 24, 48)), "resnet50", "resnet101"]
        for network, (i, strategy) in itertools.product(
            networks, enumerate(("rockmate", "rotor", "checkmate cbc"))
        ):
            status = "timeout" if i == 2 and network != "gpt2:2" else "ok"
            made.append(
                row(table, network, strategy, "60%", solve_seconds=10.0 ** (i - 1), status=status)
            )
    elif table == "timeline":
        for network, strategy in itertools.product(
            ("gpt2-small", "resnet50", "unet"), ("plain", "rockmate", "checkpoint")
        ):
            curve = {"curve_ms": "0 1 2 3 4", "curve_kib": "0 1000 5000 800 0"}
            made.append(row(table, network, strategy, budget_bytes=4 * 2**20, **curve))
    elif table == "throughput":
        for network, (i, strategy), batch in itertools.product(
            ("gpt2-small", "resnet50"),
            enumerate(("plain", "rockmate", "checkpoint every block")),
            (4, 8, 12, 16, 24),
        ):
            status = "ok" if batch <= 4 + 8 * i else "over budget"
            values = {"batch": batch, "throughput_ratio": 1 - batch / 99, "budget_bytes": 2**25}
            made.append(row(table, network, strategy, "peak@4", status=status, **values))
    elif table == "options":
        for network, budget, (i, grid) in itertools.product(
            ("gpt2-medium", "resnet50"), ("30%", "50%"), enumerate(("2x2", "3x3", "5x8", "20x20"))
        ):
            values = {"planned_overhead_percent": 9 - i, "solve_seconds": 2.0**i}
            made.append(row(table, network, grid, budget, **values))
    elif table == "step":
        made = step_rows()
    elif table == "lengths":
        for network, step in itertools.product(("bert", "llama", "unet"), range(40)):
            values = {"step": step, "planned_s": 1.1 + (step % 7 == 0), "plain_s": 1.0}
            peak = {"peak_bytes": "9" if step % 7 == 0 else ""}
            made.append(row(table, network, "", **values) | peak)
    else:
        for i, strategy in enumerate(STRATEGIES):
            for share in (0.3, 0.6):
                made.append(
                    row(table, "gpt", strategy, f"{share}", flops_ratio=1 + 0.1 * i / share)
                    | {"peak_bytes": f"{int(2**28 * share)}"}
                )
    return made


def step_rows() -> list[Row]:
    """Return rows of every subject, of two checkouts one of which fails in places."""
    made = []
    for subject, which in itertools.product(subjects(), ("this", "against")):
        values = {
            "which": which,
            "kind": subject.kind,
            "name": subject.name,
            "target": subject.target,
            **dict.fromkeys(("time_ratio", "capture_seconds"), 1.2),
            **dict.fromkeys(("time_ratio_low", "capture_seconds_low"), 1.1),
            **dict.fromkeys(("time_ratio_high", "capture_seconds_high"), 1.5),
            "measured_minus_planned_points": -4.0,
        }
        ways = ["rockmate"]
        if subject.kind == "recomputed":
            ways = ["checkpoint", "rockmate", "rockmate recompute_all"]
        for strategy in ways:
            made.append(row("step", subject.network, strategy, **values))
        if (which, subject.name) in (("against", "gru20"), ("this", "planned_unet_60")):
            made[-1]["status"] = "infeasible"
    return made


def assert_legends_lie_inside(figure: Figure) -> None:
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


@pytest.mark.parametrize(("name", "table"), [(n, t) for n, (t, _) in visualize.FIGURES.items()])
def test_no_text_covers_another(name: str, table: str) -> None:
    rows = rows_of(table)
    figure = visualize.FIGURES[name][1](rows)
    style.stamp(figure, rows)
    try:
        assert style.overlapping(figure) == []
        assert_legends_lie_inside(figure)
    finally:
        plt.close(figure)


def test_the_legend_of_a_narrow_figure_has_fewer_columns() -> None:
    rows = [r for r in rows_of("compiled") if r["network"] in ("gpt", "unet")]
    figure = visualize.FIGURES["compiled"][1](rows)
    try:
        figure.draw_without_rendering()
        assert figure.legends
        assert_legends_lie_inside(figure)
    finally:
        plt.close(figure)


def test_overlapping_texts_are_found() -> None:
    figure = plt.figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.51, "other")
    figure.text(0.1, 0.1, "far away")
    assert style.overlapping(figure) == [("one", "other")]
    plt.close(figure)


def test_one_picture_per_device_and_size(tmp_path: Path) -> None:
    table = Table(tmp_path / "peers.csv", COLUMNS)
    for made in rows_of("peers"):
        table.append(made)
        table.append(made | {"device": "cuda (NVIDIA H100 80GB)", "size": "paper"})
        table.append(made | {"size": "smoke"})
    written = visualize.draw_all(tmp_path, tmp_path / "figures")
    names = sorted(path.name for path in written)
    assert names == ["peers-cuda-NVIDIA-H100-80GB-paper.png", "peers.png"]
    assert all(path.stat().st_size > 5000 for path in written)


def test_nothing_measured_nothing_drawn(tmp_path: Path) -> None:
    table = Table(tmp_path / "peers.csv", COLUMNS)
    table.append(rows_of("peers")[0] | {"status": "failed"})
    assert visualize.draw_all(tmp_path, tmp_path / "figures") == []
    assert experiment.read_rows(tmp_path / "missing.csv") == []


def test_the_table_of_low_budgets_shows_both_ends_of_a_network(tmp_path: Path) -> None:
    low = {"plain_peak_bytes": 4 * 2**20, "peak_bytes": 2**20, "time_ratio": 1.2}
    least = low | {"peak_bytes": 2**19, "time_ratio": 1.4}
    table = Table(tmp_path / "blocks.csv", COLUMNS)
    for way in (("checkpoint", "every block"), ("rockmate-blocks", "peak of checkpoint")):
        table.append(row("blocks", "gpt2-small:4", *way, **low))
    table.append(row("blocks", "gpt2-small:4", "rockmate-blocks", "smallest", **least))
    text = tables.low_table(tmp_path, "blocks")
    assert "| gpt2-small:4 | 4.0 MiB | 25 %, ×1.20 | 25 %, ×1.20 | 12 %, ×1.40 |" in text
    assert tables.low_table(tmp_path) == ""  # nothing measured, no table
