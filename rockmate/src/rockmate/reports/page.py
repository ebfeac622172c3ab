"""One self-contained page that shows a plan, without scripts, fonts or other files."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import date

from rockmate.problems.problem import Problem
from rockmate.reports.charts import Chart, byte_unit, thinned
from rockmate.reports.curve import CurvePoint
from rockmate.reports.modules import ModuleRow, columns, module_rows, moved_rows, phases
from rockmate.schedules.baselines import keeping_all_bytes, no_recomputation
from rockmate.schedules.moves import clocks_of
from rockmate.schedules.plan import OpaquePiece, Plan
from rockmate.schedules.report import certificate, format_bytes, format_ms, round_up
from rockmate.schedules.simulate import simulate

_MOST_ROWS, _OPEN_ROWS = 60, 8
_WORDS = {
    "budget": "what forward and backward may hold together, above parameters, their gradients and "
    "inputs",
    "predicted peak": "what the plan says that they hold at most; it is computed, not measured",
    "peak of the self-test": "what the allocator counted in one step that was run after planning",
    "peak without recomputation": "the same step where nothing runs twice",
    "extra time": "the time of what runs twice, as a share of a step where nothing does",
    "above the optimum": "no plan within this budget can be faster by more than that; it is proven",
    "moved elsewhere": "bytes that are in other memory or a file meanwhile; a step waits for slow "
    "copies, which never take more memory",
    "kept": "bytes that a module leaves for its backward, of those that plain PyTorch keeps",
}
STYLE = """
.rockmate{--ink:#1b1f24;--soft:#667;--line:#d8dce2;--paper:#fff;--card:#f5f7fa;--forward:#3b7dd8;
--recomputation:#e08a1e;--backward:#3a9d78;--budget:#c22f3d;--plain:#8a8fa0;--waiting:#b9bdc7;
--elsewhere:#8a4fbf;font:16px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
@media(max-width:480px){.rockmate table{font-size:.8rem}}
@media(prefers-color-scheme:dark){.rockmate{--ink:#e8eaee;--soft:#a3a9b5;--line:#3a404b;
--paper:#14171c;--card:#1e232b;--waiting:#6b7280;--elsewhere:#b98ae6;--budget:#ff6b78}}
.rockmate main{max-width:1040px;margin:0 auto;padding:12px}
.rockmate h1{font-size:1.35rem;margin:.4em 0;overflow-wrap:anywhere}
.rockmate h2{font-size:1.05rem;margin:0 0 .4em}
.rockmate p{margin:.3em 0;color:var(--soft);font-size:.9rem}
.rockmate .facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:8px}
.rockmate .fact,.rockmate section{background:var(--card);border-radius:8px;padding:10px 12px}
.rockmate .fact b{display:block;font-size:1.15rem}
.rockmate .fact span{color:var(--soft);font-size:.8rem}
.rockmate .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));
gap:10px;margin:10px 0}
.rockmate section{margin:10px 0;min-width:0}.rockmate .charts section{margin:0}
.rockmate svg{width:100%;height:auto;display:block}
.rockmate svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.rockmate svg polyline{fill:none;stroke-width:2}.rockmate svg .grid{stroke:var(--line)}
.rockmate svg path.forward{fill:var(--forward)}.rockmate svg path.backward{fill:var(--backward)}
.rockmate svg path.recomputation{fill:var(--recomputation)}
.rockmate svg polyline.budget{stroke:var(--budget);stroke-dasharray:6 3}
.rockmate svg text.budget{fill:var(--budget)}
.rockmate svg polyline.plain{stroke:var(--plain);stroke-width:1.5}
.rockmate svg path.waiting{fill:var(--waiting)}
.rockmate svg polyline.elsewhere{stroke:var(--elsewhere)}
.rockmate svg polyline.plans{stroke:var(--forward)}
.rockmate svg polyline.bound{stroke:var(--plain);stroke-dasharray:3 3}
.rockmate svg circle.budget{fill:var(--budget)}
.rockmate .key{white-space:nowrap;margin-right:.6em}
.rockmate .key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.3em}
.rockmate .scroll{overflow-x:auto}
.rockmate table{border-collapse:collapse;width:100%;font-size:.88rem}
.rockmate th,.rockmate td{text-align:right;padding:3px 6px;border-top:1px solid var(--line);
white-space:nowrap}
.rockmate th:first-child,.rockmate td:first-child{text-align:left;white-space:normal;
overflow-wrap:anywhere;min-width:90px}
.rockmate .texts td:last-child{text-align:left;white-space:normal}
.rockmate .bar{position:relative;min-width:70px;margin:.25em 0;height:.8em;background:var(--line);
border-radius:3px;overflow:hidden}
.rockmate svg .say{fill:transparent}.rockmate svg .say:hover{fill:var(--ink);fill-opacity:.12}
.rockmate summary{cursor:pointer;color:var(--soft);font-size:.9rem;padding:.3em 0}
.rockmate dl{font-size:.88rem;margin:.3em 0}.rockmate dt{font-weight:600}
.rockmate dd{margin:0 0 .4em;color:var(--soft)}
@media print{.rockmate{--paper:#fff;--card:#fff;--ink:#000;print-color-adjust:exact;
-webkit-print-color-adjust:exact}.rockmate section,.rockmate .fact{break-inside:avoid;
border:1px solid var(--line)}}
.rockmate .bar i{position:absolute;inset:0 auto 0 0;background:var(--forward)}
"""


@dataclass(frozen=True)
class PlanFacts:
    """What a page shows of a planned module."""

    problem: Problem
    plan: Plan
    _: KW_ONLY
    name: str = "the module"  # of its class
    seconds: Mapping[str, float] = field(default_factory=dict)  # of planning, by phase
    measured_peak_bytes: int | None = None
    pieces: tuple[OpaquePiece, ...] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)  # device, versions, shapes
    is_timed: bool = True  # False with cost="flops": milliseconds are then FLOPs


def page(facts: PlanFacts, curve: Sequence[CurvePoint]) -> str:
    """Return a whole HTML document."""
    title = html.escape(f"{facts.name} within {format_bytes(facts.plan.budget_bytes)}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>body{{margin:0}}{STYLE}</style></head>"
        f'<body class="rockmate"><main><h1>{title}</h1>{_made_with(facts)}'
        + "".join(_parts(facts, curve))
        + "</main></body></html>\n"
    )


def snippet(facts: PlanFacts) -> str:
    """Return the HTML for a notebook: the figures and memory over the step."""
    memory = memory_section(facts.problem, facts.plan, facts.is_timed)
    return (
        f'<style>{STYLE}</style><div class="rockmate"><main>{_facts(facts)}'
        f'<div class="charts">{memory}</div></main></div>'
    )


def _parts(facts: PlanFacts, curve: Sequence[CurvePoint]) -> Iterator[str]:
    problem, plan = facts.problem, facts.plan
    yield _facts(facts)
    memory = memory_section(problem, plan, facts.is_timed)
    yield f'<div class="charts">{memory}{_curve_section(plan, curve)}</div>'
    yield _modules_section(module_rows(problem, plan.steps, plan.moves), facts.is_timed)
    yield _moves_section(problem, plan, facts.is_timed)
    if facts.pieces:
        rows = [
            [html.escape(piece.path or "(the module itself)"), html.escape(str(piece))]
            for piece in facts.pieces
        ]
        yield _section(
            "Opaque pieces",
            "Submodules that could not be recorded and run whole, as torch.utils.checkpoint "
            "would; sizes and times are those of the sample.",
            _table(["module", "what was found"], rows, "texts"),
        )
    yield _planning_section(plan, facts.seconds)
    words = "".join(f"<dt>{word}</dt><dd>{said}</dd>" for word, said in _WORDS.items())
    yield _section("What the words mean", "", f"<dl>{words}</dl>")


def _facts(facts: PlanFacts) -> str:
    plan, measured = facts.plan, facts.measured_peak_bytes
    shown = [
        (format_bytes(plan.budget_bytes), "budget"),
        (format_bytes(plan.peak_bytes), "predicted peak"),
        (format_bytes(measured) if measured is not None else "not run", "peak of the self-test"),
        (format_bytes(keeping_all_bytes(facts.problem)), "peak without recomputation"),
        (f"{100 * plan.overhead:.2f} %", "extra time"),
        (_distance(plan), "above the optimum"),
    ]
    if facts.is_timed:
        shown.append((format_ms(plan.time_ms), "predicted step"))
    cells = (f'<div class="fact"><b>{html.escape(a)}</b><span>{b}</span></div>' for a, b in shown)
    return f'<div class="facts">{"".join(cells)}</div>'


def _distance(plan: Plan) -> str:
    if plan.gap is None:
        return "not known"
    return "0 %, proven" if plan.status == "optimal" else f"≤ {round_up(100 * plan.gap)} %"


def _made_with(facts: PlanFacts) -> str:
    told = ", ".join(f"{name} {value}" for name, value in facts.made_with.items())
    told = f" with {told}" if told else ""
    return f"<p>Written on {date.today().isoformat()}; planned{html.escape(told)}.</p>"


def memory_section(problem: Problem, plan: Plan, is_timed: bool = True) -> str:
    """Return memory over the step as a section, against the budget."""
    found = columns(problem, plan)
    now, steps = found.end_ms, no_recomputation(problem)
    # The plain step, on the same time axis; it ends earlier.
    plain, line, then = simulate(problem, steps), [], 0.0
    for (_, ms), peak in zip(phases(problem, steps), plain.peak_during, strict=True):
        line += [(then, float(peak)), (then + ms, float(peak))]
        then += ms
    highest = max((high for *_, high in found.elsewhere), default=0.0)
    top = 1.12 * max(plan.budget_bytes, plan.peak_bytes, plain.peak_bytes, highest)

    def at(ms: float) -> str:
        return f"{ms:.3g} ms" if is_timed else f"{100 * ms / (now or 1.0):.3g} %"

    chart = Chart(
        *("memory over one step", now, top),
        *(at, _short_bytes, "time in the step" if is_timed else "share of the step's FLOPs"),
        x_unit=1.0 if is_timed else (now or 1.0) / 100,
        y_unit=byte_unit(top),
    )
    kinds = {kind: drawn for kind, drawn in found.kinds.items() if drawn}
    for kind, drawn in kinds.items():
        shown = thinned(drawn, now)
        chart.bars(shown, kind)
        chart.say([(a, b, f"{kind} at {at(a)}: {_short_bytes(high)}") for a, b, high in shown])
    chart.line(_thin_line(line, now), "plain")
    if found.elsewhere:
        steps_of = [p for a, b, high in found.elsewhere for p in ((a, high), (b, high))]
        chart.line(_thin_line(steps_of, now), "elsewhere")
    chart.level(float(plan.budget_bytes), "budget", f"budget {format_bytes(plan.budget_bytes)}")
    colours = "".join(_key(kind, kind) for kind in kinds)
    if found.elsewhere:
        colours += _key("elsewhere", "moved elsewhere")
    return _section(
        "Memory over the step", colours + _key("plain", "without recomputation"), chart.svg()
    )


def _curve_section(plan: Plan, curve: Sequence[CurvePoint]) -> str:
    if not curve:
        return ""
    most = max(100 * plan.overhead, *(100 * p.overhead for p in curve), 1.0)
    ends = [*(float(p.budget_bytes) for p in curve), float(plan.budget_bytes)]
    chart = Chart(
        *("extra time over budget", max(ends), 1.12 * most, _short_bytes),
        *(lambda value: f"{value:g} %", "budget"),
        x_from=min(ends),
        x_unit=byte_unit(max(ends)),
    )
    chart.line([(p.budget_bytes, 100 * p.overhead) for p in curve], "plans")
    chart.line([(p.budget_bytes, 100 * p.bound) for p in curve], "bound")
    chart.dot(
        (plan.budget_bytes, 100 * plan.overhead),
        "budget",
        f"this plan: {100 * plan.overhead:.1f} %",
    )
    return _section(
        "Extra time over budget",
        _key("forward", "plans of quick planners") + _key("plain", "no schedule can be below"),
        chart.svg(),
    )


def _modules_section(rows: Sequence[ModuleRow], is_timed: bool) -> str:
    shown = []
    for row in rows[:_MOST_ROWS]:
        share = row.kept_bytes / row.plain_bytes if row.plain_bytes else 0.0
        # A plan may keep more here than plain PyTorch, and less elsewhere.
        word = "of" if row.kept_bytes <= row.plain_bytes else "plain:"
        shown.append(
            [
                html.escape(row.where or "(top)"),
                _bar(share)
                + f"{_short_bytes(row.kept_bytes)}<br>{word} {_short_bytes(row.plain_bytes)}",
                (f"×{row.runs}" + (f"<br>{format_ms(row.recompute_ms)}" if is_timed else ""))
                if row.runs
                else "",
            ]
        )
    rest = len(rows) - len(shown)
    text = "From forward to backward, most first; equal layers are one row."
    return _section(
        "Kept and recomputed by module",
        text + (f" {rest} smaller rows are left out." if rest > 0 else ""),
        _folded_table(["module", "kept", "run again"], shown),
    )


def _moves_section(problem: Problem, plan: Plan, is_timed: bool) -> str:
    rows, link = moved_rows(problem, plan), problem.link
    if not rows or link is None:
        return ""
    clocks = clocks_of(problem, plan.steps, plan.moves, link)
    whole = clocks.total_ms or 1.0

    def at(ms: float) -> str:
        return format_ms(ms) if is_timed else f"{100 * ms / whole:.3g} %"

    cells = [
        [
            html.escape(f"{row.op} of {row.where or '(top)'}, {_short_bytes(row.size_bytes)}"),
            f"{at(row.out_ms)}<br>gone: {at(row.gone_ms)}",
            at(row.back_ms),
        ]
        for row in rows[:_MOST_ROWS]
    ]
    waits = f"Of the step, {100 * clocks.stall_ms / whole:.2f} % waits for copies."
    text = (
        f"The link is in use outwards for {100 * clocks.out_ms / whole:.0f} % of the step and "
        f"inwards for {100 * clocks.in_ms / whole:.0f} %. {waits} The largest come first."
    )
    head = ["tensor", "out from", "back from"]
    return _section("Moved elsewhere", text, _folded_table(head, cells))


def _planning_section(plan: Plan, seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    rows = [
        [
            html.escape(name.replace("_", " ")),
            _bar(spent / total if total else 0.0),
            f"{spent:.2f} s",
        ]
        for name, spent in seconds.items()
    ]
    tried = [
        [
            html.escape(trial.planner),
            "-" if trial.overhead_ms is None or not plan.base_time_ms
            else f"{100 * trial.overhead_ms / plan.base_time_ms:.2f} %",
            "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
            f"{trial.seconds:.2f} s",
        ]
        for trial in plan.tried
    ]  # fmt: skip
    parts = _table(["phase", "", "seconds"], rows) if rows else ""
    if tried:
        parts += "<p>Planners that were tried:</p>"
        parts += _table(["planner", "extra time", "peak", "seconds"], tried)
    return _section(
        "Planning by phase",
        f"Chosen: {html.escape(plan.planner)}; distance from the optimum: {certificate(plan)}.",
        parts,
    )


def _bar(share: float) -> str:
    return f'<div class="bar"><i style="width:{100 * min(1.0, share):.0f}%"></i></div>'


def _key(colour: str, text: str) -> str:
    return f'<span class="key"><i style="background:var(--{colour})"></i>{text}</span> '


def _section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{f'<p>{text}</p>' if text else ''}{body}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll {kind}"><table><tr>{top}</tr>{body}</table></div>'


def _folded_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of which only the first rows are open."""
    first, rest = rows[:_OPEN_ROWS], rows[_OPEN_ROWS:]
    if not rest:
        return _table(head, first)
    more = f"<details><summary>{len(rest)} more</summary>{_table(head, rest)}</details>"
    return _table(head, first) + more


def _short_bytes(value: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def _thin_line(points: Sequence[tuple[float, float]], x_to: float) -> list[tuple[float, float]]:
    columns = [(a, b, high) for (a, high), (b, _) in zip(points[::2], points[1::2], strict=True)]
    return [p for a, b, high in thinned(columns, x_to) for p in ((a, high), (b, high))]
