"""A plan as text: its costs, its gap to the optimum, and its recomputations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rockmate.schedules.baselines import keeping_all_bytes
from rockmate.schedules.moves import clocks_of
from rockmate.schedules.simulate import recompute_counts, simulate
from rockmate.schedules.steps import first_forwards

if TYPE_CHECKING:
    from rockmate.problems.problem import Problem
    from rockmate.schedules.plan import Plan, Trial
    from rockmate.schedules.steps import Steps


_ROWS = 12  # rows of the table of recomputations
_WIDTH = 88


def format_bytes(count: int) -> str:
    """Return bytes in binary units: `1.20 GiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def exact_bytes(count: int) -> str:
    """Return a count that a user may copy, and what is read: `1536 bytes (1.50 KiB)`."""
    return f"{count} bytes ({format_bytes(count)})" if abs(count) >= 1024 else f"{count} bytes"


def place_in_model(module_path: str) -> str:
    """Return the words for a module in messages: `module '3.0'`, or `the model itself`."""
    return f"module '{module_path}'" if module_path else "the model itself"


def format_ms(value: float) -> str:
    """Return a time with three or four significant digits: `12.3 ms`, `1.23 s`."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    if value >= 100:
        return f"{value:.0f} ms"
    if value >= 10:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms" if value >= 0.1 or value == 0 else f"{value * 1000:.1f} us"


@dataclass(frozen=True, slots=True)
class RecomputedRow:
    """Nodes of one operation in repeated layers, with the time of their recomputations."""

    where: str  # module path, repeated layers folded
    op: str
    nodes: int
    runs: int  # forwards beyond the first, of all the nodes
    total_ms: float


def _moved(problem: Problem, plan: Plan, *, is_timed: bool) -> list[str]:
    """Return what a plan moves elsewhere, and how long its steps wait for that."""
    link = problem.link
    if link is None:
        return []
    rates = (
        f"{link.out_bytes_per_ms / 1e6:.3g} GB/s out, {link.in_bytes_per_ms / 1e6:.3g} GB/s in, "
        f"{format_ms(link.latency_ms)} for each copy"
    )
    if not plan.moves:
        return [_field("moved", "nothing; it would save no time"), _field("link", rates)]
    sizes = {move.storage: problem.sizes[move.storage] for move in plan.moves}
    lines = [
        _field("moved", f"{len(sizes)} tensors, {format_bytes(sum(sizes.values()))} at most there")
    ]
    if is_timed:
        clocks = clocks_of(problem, plan.steps, plan.moves, link)
        text = f"out {format_ms(clocks.out_ms)}, in {format_ms(clocks.in_ms)} of the step; "
        waits = f"{format_ms(clocks.stall_ms)} of it are waited for"
        text += waits if clocks.stall_ms else "nothing waits"
        lines.append(_field("link in use", text))
    return [*lines, _field("link", rates)]


def format_plan(problem: Problem, plan: Plan, *, is_timed: bool = True) -> str:
    """Return a table of a plan: budget, peak, overhead, certificate and recomputations.

    Milliseconds are left out if operations were counted instead of timed (`cost="flops"`).
    """
    timeline = simulate(problem, plan.steps, plan.moves)
    used = 100 * plan.peak_bytes / plan.budget_bytes if plan.budget_bytes else 0.0
    lines = [
        _rule("Plan"),
        _field("budget", format_bytes(plan.budget_bytes)),
        _field("predicted peak", f"{format_bytes(plan.peak_bytes)}  ({used:.1f} % of the budget)"),
        _field("reached in", _where(problem, plan.steps, timeline.peak_step)),
        _field("keeping all", format_bytes(keeping_all_bytes(problem))),
        _field("step time", _step_time(plan) if is_timed else "not measured: FLOPs are counted"),
        _field("overhead", f"{100 * plan.overhead:.2f} %"),
        *_moved(problem, plan, is_timed=is_timed),
        _field("distance", certificate(plan)),
        _field("planner", f"{plan.planner}, {plan.plan_seconds:.1f} s of planning"),
    ]
    if len(plan.tried) > 1:
        lines += ["", _rule("Planners tried"), *_trial_lines(plan.tried, plan.base_time_ms)]
    rows = recomputed_rows(problem, plan.steps)
    lines += ["", _rule("Recomputed")]
    lines += _recomputed_lines(rows, plan.overhead_ms, is_timed) if rows else ["  nothing"]
    return "\n".join(lines)


def recomputed_rows(problem: Problem, steps: Steps) -> list[RecomputedRow]:
    """Return the recomputations by module path and operation, the most expensive first."""
    counts = recompute_counts(problem, steps)
    keys = {
        k: (node.module_path, node.op or node.name)
        for k, node in enumerate(problem.nodes)
        if counts[k] > 0
    }
    rows = [
        RecomputedRow(
            where=where,
            op=op,
            nodes=len(nodes),
            runs=sum(counts[k] for k in nodes),
            total_ms=sum(counts[k] * problem.nodes[k].fwd_time_ms for k in nodes),
        )
        for where, op, nodes in folded(keys)
    ]
    return sorted(rows, key=lambda row: (-row.total_ms, row.where, row.op))


def folded(keys: Mapping[int, tuple[str, str]]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield (where, operation, nodes), those of repeated layers together, by their (path, op)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for k, key in keys.items():
        groups.setdefault(key, []).append(k)
    rows: dict[tuple[str, str], list[str]] = {}
    for (path, op), label in _fold(list(groups)).items():
        rows.setdefault((label, op), []).append(path)
    for (label, op), paths in rows.items():
        yield _spell(label, paths), op, [k for path in paths for k in groups[path, op]]


def _rule(title: str) -> str:
    return f"-- {title} " + "-" * (_WIDTH - len(title) - 4)


def _field(name: str, value: str) -> str:
    return f"  {name:<16}{value}"


def _step_time(plan: Plan) -> str:
    extra = f"{format_ms(plan.overhead_ms - plan.stall_ms)} of recomputation"
    if plan.moves:
        extra += f", {format_ms(plan.stall_ms)} of waiting for copies"
    return f"{format_ms(plan.time_ms)}  ({format_ms(plan.base_time_ms)} and {extra})"


def _where(problem: Problem, steps: Steps, t: int) -> str:
    if t < 0:
        return "no step"
    kind, k = steps[t]
    node = problem.nodes[k]
    is_first = first_forwards(steps)[t]
    phase = "backward" if kind == "B" else "forward" if is_first else "recomputation"
    place = f" of {node.module_path}" if node.module_path else ""
    return f"the {phase} of {node.op or node.name}{place}"


def certificate(plan: Plan) -> str:
    """Return a plan's largest possible distance from the optimum, in words."""
    gap = plan.gap
    if gap is None:
        return "not known: no bound was computed"
    if plan.status == "optimal":
        return "none: proven optimal"
    return f"at most {round_up(100 * gap)} % above the optimum"


def round_up(percent: float) -> str:
    """Format with two decimals, rounded up, so that a bound does not look better than it is."""
    return f"{-(-percent * 100 // 1) / 100:.2f}"


def _trial_lines(tried: Sequence[Trial], base_ms: float) -> list[str]:
    lines = [f"  {'planner':<34}{'overhead':>10}{'peak':>14}{'seconds':>10}  note"]
    for trial in tried:
        overhead = "-"
        if trial.overhead_ms is not None:
            overhead = f"{100 * trial.overhead_ms / base_ms if base_ms else 0:.2f} %"
        peak = "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
        line = f"  {trial.planner:<34}{overhead:>10}{peak:>14}{trial.seconds:>10.2f}  {trial.note}"
        lines.append(line.rstrip())
    return lines


def _recomputed_lines(
    rows: Sequence[RecomputedRow], overhead_ms: float, is_timed: bool
) -> list[str]:
    shown = [row for row in rows[:_ROWS] if _percent(row, overhead_ms) >= 1] or list(rows[:_ROWS])
    width = min(44, max(len(row.where) for row in shown) + 2)
    width = max(width, 8)
    op_width = min(24, max(len(row.op) for row in shown) + 2)
    time = f"{'time':>11}" if is_timed else ""
    lines = [f"  {'module':<{width}}{'op':<{op_width}}{'runs':>6}{time}{'share':>9}"]
    for row in shown:
        where = row.where or "(top)"
        if len(where) > width - 1:
            where = where[: width - 4] + "..."
        time = f"{format_ms(row.total_ms):>11}" if is_timed else ""
        lines.append(
            f"  {where:<{width}}{_cut(row.op, op_width):<{op_width}}{'x' + str(row.runs):>6}"
            f"{time}{_percent(row, overhead_ms):>7.1f} %"
        )
    rest = rows[len(shown) :]
    if rest:
        together = sum(_percent(row, overhead_ms) for row in rest)
        below = max(_percent(row, overhead_ms) for row in rest)
        each = "below 1 % each, " if below < 1 else ""
        lines.append(f"  and {len(rest)} more, {each}{together:.1f} % together")
    return lines


def _percent(row: RecomputedRow, overhead_ms: float) -> float:
    return 100 * row.total_ms / overhead_ms if overhead_ms else 0.0


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else text[: width - 4] + "..."


def _fold(groups: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return for each (path, op) its path with at most one layer number replaced by `{}`.

    It replaces the number in which most paths of the same operation differ.
    """
    options: dict[tuple[str, str], list[str]] = {}
    members: dict[tuple[str, str], int] = {}
    for path, op in groups:
        parts = path.split(".")
        options[path, op] = []
        for i, part in enumerate(parts):
            if part.isdigit():
                label = ".".join([*parts[:i], "{}", *parts[i + 1 :]])
                options[path, op].append(label)
                members[label, op] = members.get((label, op), 0) + 1
    folded = {}
    for (path, op), labels in options.items():
        best = max(labels, key=lambda label: members[label, op], default=None)
        alone = best is None or members[best, op] == 1
        folded[path, op] = path if best is None or alone else best
    return folded


def _spell(label: str, paths: Iterable[str]) -> str:
    """Replace `{}` by the range of its numbers: `blocks.{0..11}.mlp`."""
    if "{}" not in label:
        return label
    position = label.split(".").index("{}")
    numbers = sorted({int(path.split(".")[position]) for path in paths})
    if len(numbers) == 1:
        return label.replace("{}", str(numbers[0]))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    spelled = ",".join(
        str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in runs
    )
    return label.replace("{}", "{" + spelled + "}")
