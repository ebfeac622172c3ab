"""Tables of the committed rows, as Markdown: what the READMEs say was measured, they read here."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.experiment import measured_where, read_rows
from harness.meter import markdown_table
from harness.points import Row

MIB, MB = 2**20, 10**6
_LARGE_NODES = 500  # up to which planning has an aim in seconds
NAMES = {
    "checkpoint": "checkpoint",
    "selective": "selective checkpointing,",
    "compile": "torch.compile, inductor,",
    "compile-aot": "torch.compile, aot_eager,",
}


def of_size(rows: Iterable[Row], size: str = "cpu") -> list[Row]:
    """Return the rows of one size that were measured to the end."""
    return [row for row in rows if row["size"] == size and row["status"] == "ok"]


def peers_table(results: Path) -> str:
    """Return the best peers, and Rockmate within the peak of each; "" where nothing is measured."""
    rows = of_size(read_rows(results / "peers.csv"))
    ours = sorted(
        (row for row in rows if row["strategy"] == "rockmate"), key=lambda r: int(r["budget_bytes"])
    )
    peers = [row for row in rows if row["strategy"] not in ("rockmate", "plain")]
    if not ours or not peers:
        return ""
    best, lines = float("inf"), []
    for peer in sorted(peers, key=lambda r: (int(r["peak_bytes"]), float(r["flops_ratio"]))):
        flops = float(peer["flops_ratio"])
        if flops >= best - 5e-5:
            continue  # a peer with a smaller peak does as well
        best = flops
        # budgets stand for peers within half a percent above: never the other way round
        within = [row for row in ours if int(row["budget_bytes"]) <= int(peer["peak_bytes"])]
        if not within:
            continue
        own = within[-1]
        lines.append(
            [
                f"{NAMES[peer['strategy']]} {peer['budget']}",
                f"{int(peer['peak_bytes']) / MIB:.1f} MiB",
                f"×{flops:.4f}",
                f"×{float(peer['time_ratio']):.2f}",
                f"{int(own['peak_bytes']) / MIB:.1f} MiB",
                f"×{float(own['flops_ratio']):.4f}",
                f"×{float(own['time_ratio']):.2f}",
            ]
        )
    header = ["best peer", "its peak", "FLOPs", "time", "Rockmate's peak", "FLOPs", "time"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def split_table(results: Path) -> str:
    """Return steps in pieces of rows: at the smallest budgets, at goals, beside loops by hand."""
    rows = read_rows(results / "split.csv")
    lines = []
    for row in rows:
        name = f"{row['network']}, {row['way']}"
        if row["why"]:
            lines.append([name, "—", "—", row["why"]])
            continue
        of = f"{int(row['peak_bytes']) / MB:.1f} of {int(row['plain_peak_bytes']) / MB:.1f}"
        pieces = re.search(r"(\d+) pieces", row["cut"])
        cut = f"{pieces[1]} pieces" if pieces else "whole"
        by_hand = not row["budget_bytes"]
        bits = "eager's bits" if row["same_bits"] == "True" else "rounded otherwise"
        how = f"{'by hand' if by_hand else cut}, {bits}"
        lines.append([name, of, f"×{float(row['time_ratio']):.2f}", how])
    if not lines:
        return ""
    header = ("network and way", "peak, MB of plain", "time over plain", "what runs in pieces")
    return (
        markdown_table(header, lines)
        + "\nOther programs ran meanwhile, at a load of 3 to 13 on two cores.\n"
        + measured_where([row for row in rows if not row["why"]])
    )


def offload_table(results: Path) -> str:
    """Return moves by hand, and Rockmate within the peak of each with and without moves."""
    rows = of_size(read_rows(results / "offload.csv"))
    lines = []

    def place(row: Row) -> tuple[str, int, bool]:
        ours = row["strategy"] == "rockmate"
        return row["network"], int(row["budget_bytes"] if ours else row["peak_bytes"]), ours

    for row in sorted(rows, key=place):
        name = f"by hand, {row['strategy']}, {row['budget']}"
        if row["strategy"] == "rockmate":
            where = row["budget"].partition(" ")[2]
            name = f"Rockmate, {where}" if where else "Rockmate, recomputation alone"
        planned, bound = row["planned_overhead_percent"], row["bound_percent"]
        lines.append(
            [
                f"{row['network']}, {name}",
                f"{int(row['peak_bytes']) / MIB:.1f} of {int(row['plain_peak_bytes']) / MIB:.1f}",
                f"{float(planned):.1f} %" if planned else "—",
                f"{float(bound):.1f} %" if bound else "—",
                f"{100 * float(row['time_ratio']) - 100:.0f} %",
                f"{int(row['moved_bytes']) / MIB:.1f}" if row["moved_bytes"] else "—",
                f"{int(row['resident_bytes']) / MIB:.1f} of "
                f"{int(row['plain_resident_bytes']) / MIB:.1f}",
            ]
        )
    if not lines:
        return ""
    header = [
        *("network and way", "peak, MiB of plain", "extra time, planned", "least possible"),
        *("measured", "moved, MiB", "process grew by, MiB of plain"),
    ]
    return (
        markdown_table(header, lines)
        + "\nTimes are by the wall. The host's memory is taken before the first step, so that the "
        "process does not grow by it.\nFiles by hand go through the system's cache, ours past it. "
        "What is possible depends on\nthe link as it was measured in that process. "
        + f"Other programs ran meanwhile, at a load of {loads(rows)} on two cores.\n"
        + measured_where(rows)
    )


def loads(rows: Iterable[Row]) -> str:
    """Return how busy the machine was, from the least to the most."""
    found = [float(row["load"]) for row in rows]
    return f"{min(found):.1f} to {max(found):.1f}"


def throughput_table(results: Path) -> str:
    """Return the largest batch that fits under each strategy, and its speed."""
    rows = of_size(read_rows(results / "throughput.csv"))
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        memory = max(int(row["budget_bytes"]) for row in own)
        for strategy in dict.fromkeys(row["strategy"] for row in own):
            last = max((r for r in own if r["strategy"] == strategy), key=lambda r: int(r["batch"]))
            lines.append(
                [
                    f"{network}, {strategy}",
                    f"{memory / MIB:.0f} MiB",
                    last["batch"],
                    f"×{float(last['throughput_ratio']):.2f}",
                ]
            )
    if not lines:
        return ""
    header = ["network and strategy", "memory", "largest batch that fits", "samples per second"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def performance_table(results: Path) -> str:
    """Return peak and extra time of every network and strategy."""
    rows = [row for row in read_rows(results / "performance.csv") if row["size"] == "cpu"]
    lines = []
    for row in rows:
        if row["strategy"] == "plain" or row["status"] == "ok":
            peak = f"{100 * int(row['peak_bytes']) / int(row['plain_peak_bytes']):.0f} %"
            time = f"{100 * (float(row['time_ratio']) - 1):+.0f} %"
        else:
            peak, time = row["status"], ""
        planned = row["planned_overhead_percent"]
        lines.append(
            [
                f"{row['network']}, {row['strategy']} {row['budget']}".strip(),
                f"{int(row['plain_peak_bytes'] or 0) / MIB:.1f} MiB",
                peak,
                f"+{float(planned):.1f} %" if planned else "",
                time,
            ]
        )
    if not lines:
        return ""
    header = ["network and strategy", "plain peak", "peak", "extra time, planned", "measured"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def low_table(results: Path, table: str = "performance") -> str:
    """Return Rockmate at checkpoint's own peak and at its smallest budget, beside checkpoint.

    A line for each network, or depth of one: peaks as shares of the plain one, times over plain.
    """
    rows = of_size(read_rows(results / f"{table}.csv"))
    ours = [s for s in ("rockmate", "rockmate-blocks") if any(r["strategy"] == s for r in rows)]
    ways = [("checkpoint", "every block"), *((s, "peak of checkpoint") for s in ours)]
    ways.append((ours[-1] if ours else "", "smallest"))
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        found = {(r["strategy"], r["budget"]): r for r in rows if r["network"] == network}
        cells = [_peak_and_time(found.get(way)) for way in ways]
        if any(way in found for way in ways[1:]):
            plain = int(found[ways[0]]["plain_peak_bytes"]) if ways[0] in found else 0
            lines.append([network, f"{plain / MIB:.1f} MiB", *cells])
    if not lines:
        return ""
    named = {"rockmate": "Rockmate", "rockmate-blocks": "`apply_to_blocks`"}
    titles = ["checkpoint, every block", *(f"{named[s]}, at this peak" for s in ours)]
    titles.append(f"{named[ours[-1]]}, at its smallest")
    header = ["network", "plain peak", *titles]
    shown = [row for row in rows if (row["strategy"], row["budget"]) in ways]
    return markdown_table(header, lines) + "\n" + measured_where(shown)


def _peak_and_time(row: Row | None) -> str:
    if row is None:
        return "—"
    share = 100 * int(row["peak_bytes"]) / int(row["plain_peak_bytes"])
    return f"{share:.0f} %, ×{float(row['time_ratio']):.2f}"


def compiled_table(results: Path) -> str:
    """Return peak, FLOPs and time of compiled pieces under a budget, and of `torch.compile`."""
    rows = of_size(read_rows(results / "compiled.csv"))
    lines = [
        [
            f"{row['network']}, {row['strategy']} {row['budget']}".strip(),
            f"{int(row['peak_bytes']) / MIB:.2f} MiB",
            f"{100 * int(row['peak_bytes']) / int(row['plain_peak_bytes']):.0f} %",
            f"×{float(row['flops_ratio']):.4f}",
            f"×{float(row['time_ratio']):.2f}",
        ]
        for row in rows
    ]
    if not lines:
        return ""
    header = ["network and strategy", "peak", "of plain", "FLOPs", "time"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def planning_table(results: Path) -> str:
    """Return seconds of planning, of every planner and network."""
    rows = [row for row in read_rows(results / "planning.csv") if row["size"] == "cpu"]
    lines = [
        [
            f"{row['network']}, {row['strategy']}",
            row["nodes"],
            f"{float(row['prepare_seconds'] or 'nan'):.1f} s",
            f"{float(row['solve_seconds'] or 'nan'):.2f} s",
            f"+{float(row['planned_overhead_percent']):.1f} %"
            if row["status"] == "ok"
            else row["status"],
        ]
        for row in rows
    ]
    if not lines:
        return ""
    header = [
        "network, planner",
        "nodes or stages",
        "capture and measuring",
        "solving",
        "extra time",
    ]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def phases_table(results: Path) -> str:
    """Return the seconds of each phase of planning, and the step at the full budget."""
    rows = read_rows(results / "phases.csv")
    if not rows:
        return ""
    names = [name.removesuffix("_s") for name in rows[0] if name.endswith("_s")]
    lines = [
        [
            row["network"],
            row["nodes"],
            *(f"{float(row[f'{name}_s'] or 0):.1f}" for name in names),
            f"+{row['overhead_at_50_percent']} %",
            f"{row['gap_percent']} %",
            row["step_over_plain_at_100_percent"] or "—",
        ]
        for row in rows
    ]
    header = ["network, budget 50 %", "nodes", *(f"{name.replace('_', ' ')}, s" for name in names)]
    header += ["extra time", "gap", "step over plain at 100 %"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def models_table(results: Path) -> str:
    """Return how long the models of many packages take to plan and to be refused."""
    rows = read_rows(results / "planning_models.csv")
    if not rows:
        return ""
    aims = (("planning_s", "planned", 2.5, 10.0), ("refusal_s", "refused", 3.0, 3.0))
    lines = []
    for name, text, middle, most in aims:
        own = [r for r in rows if r[name] and int(r["nodes"]) <= _LARGE_NODES]
        seconds = [float(row[name]) for row in own]
        slowest = max(own, key=lambda row: float(row[name]))
        lines.append(
            [
                text,
                str(len(own)),
                f"{statistics.median(seconds):.1f} s (aim {middle})",
                f"{max(seconds):.1f} s, {slowest['model']}, {slowest['nodes']} nodes (aim {most})",
                str(sum(s > most for s in seconds)),
            ]
        )
    header = [f"models of up to {_LARGE_NODES} nodes", "models", "median", "slowest", "slower"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def whole_step_table(results: Path) -> str:
    """Return what whole steps took of the memory given to them, a line for each network."""
    rows = read_rows(results / "whole_step.csv")
    lines = []
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == name]
        first = mine[0]
        used = [float(row["used_percent"]) for row in mine]
        extra = [float(row["overhead_percent"]) for row in mine]
        lines.append(
            [
                f"{name}, {first['size']}",
                *(
                    f"{int(first[column]) / MIB:.1f} MiB"
                    for column in ("asked_bytes", "predicted_bytes", "measured_bytes")
                ),
                _span(extra),
                str(len(mine)),
                _span(used),
                str(sum(percent > 100 for percent in used)),
            ]
        )
    header = ["network, size", "asked, AdamW", "predicted", "measured", "recomputed"]
    header += ["loops", "of it used", "above"]
    return markdown_table(header, lines) + "\n" + measured_where(rows)


def _span(percents: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{value:.1f}" for value in (min(percents), max(percents)))
    return " to ".join(ends) + " %"


def front_table(results: Path) -> str:
    """Return FLOPs, peak and gap of the 8-layer GPT at fifteen budgets, an effort a column."""
    efforts = {path.stem.removeprefix("front_"): path for path in results.glob("front_*.csv")}
    tables = {effort: read_rows(efforts[effort]) for effort in sorted(efforts, reverse=True)}
    if not tables:
        return ""
    first = next(iter(tables.values()))
    by_budget = {e: {row["budget_mib"]: row for row in rows} for e, rows in tables.items()}
    lines = []
    for row in first:
        line = [row["budget_mib"], row["peer_flops_ratio"] or "none fits"]
        for found in by_budget.values():
            mine = found.get(row["budget_mib"])
            line += (
                ["—"] * 3
                if mine is None
                else [mine["flops_ratio"], f"{mine['gap_percent']} %", mine["measured_mib"]]
            )
        lines.append(line)
    header = ["budget, MiB", "best peer within it, FLOPs ×"]
    for effort in tables:
        header += [f"Rockmate, {effort}, FLOPs ×", "gap", "measured MiB"]
    return markdown_table(header, lines) + "\n" + measured_where(first)
