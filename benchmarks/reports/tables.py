"""Tables of the committed rows, as Markdown: what the READMEs say was measured, they read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiment import Row, read_rows
from step_cases import subjects as step_subjects

MIB = 2**20
NAMES = {
    "checkpoint": "checkpoint",
    "selective": "selective checkpointing,",
    "compile": "torch.compile, inductor,",
    "compile-aot": "torch.compile, aot_eager,",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def measured_where(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the sentence that says where the rows come from."""

    def values(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    return (
        f"Device {values('device')}, threads {values('threads')}, torch {values('torch')}, "
        f"commit {values('commit')}.\n"
    )


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
    return markdown(header, lines) + "\n" + measured_where(rows)


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
    return markdown(header, lines) + "\n" + measured_where(rows)


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
    return markdown(header, lines) + "\n" + measured_where(rows)


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
    return markdown(header, lines) + "\n" + measured_where(rows)


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
    return markdown(header, lines) + "\n" + measured_where(rows)


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
    return markdown(header, lines) + "\n" + measured_where(first)


def step_figure(row: Mapping[str, str], precise: bool = False) -> str:
    """Return what one row of `step.csv` says; `precise` adds the spread of the rounds."""
    if row["status"] != "ok":
        return row["status"]
    if row["kind"] == "capture":
        low, high = row["capture_seconds_low"], row["capture_seconds_high"]
        spread = f" ({float(low):.2f}–{float(high):.2f})" if precise else ""
        return f"{float(row['capture_seconds']):.2f} s{spread}"
    if row["kind"] == "planned":
        planned = float(row["planned_overhead_percent"])
        measured = float(row["measured_overhead_percent"])
        difference = float(row["measured_minus_planned_points"])
        return f"{difference:+.1f} points ({measured:+.1f} − {planned:.1f})"
    words = f"×{float(row['time_ratio']):.2f}"
    if precise:
        low, high = float(row["time_ratio_low"]), float(row["time_ratio_high"])
        words = f"×{float(row['time_ratio']):.3f} ({low:.3f}–{high:.3f})"
        words += f", {float(row['step_ms']):.2f} ms over {float(row['plain_step_ms']):.2f} ms"
    if row["flops_ratio"]:
        words += f", FLOPs ×{float(row['flops_ratio']):.2f}"
    words += ", in the least budget that fits" if row["least_budget"] else ""
    return words + (", self-test failed" if row["self_test"] else "")


def step_value(row: Mapping[str, str]) -> float:
    """Return the figure of a row that its aim is for; NaN where there is none."""
    column = {"capture": "capture_seconds", "planned": "measured_minus_planned_points"}
    return float(row[column.get(row["kind"], "time_ratio")] or "nan")


def step_verdict(row: Mapping[str, str]) -> str:
    """Return the aim of a row in words, and whether it is reached."""
    if not row["target"]:
        return ""
    reached = row["status"] == "ok" and step_value(row) <= float(row["target"])
    return f"  (aim {row['target']}: {'reached' if reached else 'missed'})"


def step_table(results: Path) -> str:
    """Return a line for each subject and contender, and a column for each checkout."""
    rows = read_rows(results / "step.csv")
    if not rows:
        return ""
    titles = {subject.name: subject.title for subject in step_subjects()}
    words = {
        "step": "step at 100 %",
        "recomputed": "every block recomputed",
        "capture": "capture",
        "planned": "measured − planned",
    }
    checkouts = list(dict.fromkeys((row["which"], row["commit"]) for row in rows))
    lines = []
    for name, strategy in dict.fromkeys((row["name"], row["strategy"]) for row in rows):
        own = {r["which"]: r for r in rows if (r["name"], r["strategy"]) == (name, strategy)}
        first = next(iter(own.values()))
        title = f"{words[first['kind']]}: {titles.get(name, name)}"
        cells = [step_figure(own[which]) if which in own else "—" for which, _ in checkouts]
        if first["kind"] == "recomputed":
            title += f", {strategy}"
        lines.append([title, first["target"] or "—", *cells])
    header = ["CPU time of one thread, over plain PyTorch's", "aim"]
    header += [f"{which} ({commit})" for which, commit in checkouts]
    return markdown(header, lines) + "\n" + measured_where(rows)
