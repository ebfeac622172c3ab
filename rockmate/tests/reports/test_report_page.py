"""The page about a plan: what it says, and that a browser shows it, on a phone, too."""

from __future__ import annotations

import dataclasses
import html.parser
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rockmate import Rockmate
from rockmate.planning import Link, Move, Problem, make_plan, no_recomputation, simulate
from rockmate.reports import page
from rockmate.reports.charts import Chart, thinned, ticks
from rockmate.reports.curve import overhead_curve
from rockmate.reports.modules import ModuleRow, columns, module_rows, moved_rows
from rockmate.reports.plan_report import PlanReport
from rockmate.schedules.moves import uses_of_copies
from rockmate.schedules.plan import OpaquePiece
from runs.planned import wrap

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def wrapped() -> Rockmate:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    return wrap(nn.Sequential(*layers), torch.randn(64, 32), 0.6)


@pytest.fixture(scope="module")
def path(wrapped: Rockmate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = wrapped.plan
    piece = OpaquePiece("a<b", "Experts & co", 1234, 3.25)
    whole = PlanReport(
        *(report.problem, report.plan),
        pieces=(piece,),
        name="Net<T>",
        seconds=report.seconds,
        measured_peak_bytes=1 << 20,
    )
    return whole.html(tmp_path_factory.mktemp("page") / "plan.html", points=4)


class Elements(html.parser.HTMLParser):
    """Checks that tags close as they opened, and collects tags, texts and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_one_whole_file(path: Path, wrapped: Rockmate) -> None:
    text = path.read_text(encoding="utf-8")
    page = Elements(text)
    assert page.links == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert page.tags.count("svg") == 2
    said = " ".join(page.texts)
    for wanted in (
        "Net<T> within", "Memory over the step", "Extra time over budget", "Opaque pieces",
        "Kept and recomputed by module", "Planning by phase", "Experts & co", "capture",
        f"{100 * wrapped.plan.overhead:.2f} %",
    ):  # fmt: skip
        assert wanted in said


def test_a_notebook_and_a_figure_show_the_plan(wrapped: Rockmate) -> None:
    shown = Elements(wrapped.plan._repr_html_())
    assert "svg" in shown.tags
    assert "budget" in shown.texts
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    figure = wrapped.plan.plot()
    (axes,) = figure.axes
    highest = max(bar.get_height() for bar in axes.patches)
    assert highest * (1 << 20) == pytest.approx(wrapped.plan.peak_bytes)


def test_rows_of_modules_add_up(wrapped: Rockmate) -> None:
    problem, steps = wrapped.plan.problem, wrapped.plan.steps
    rows = module_rows(problem, steps)
    assert sum(row.recompute_ms for row in rows) == pytest.approx(wrapped.plan.overhead_ms)
    count = len(problem.nodes)
    for plan, name in ((steps, "kept_bytes"), (no_recomputation(problem), "plain_bytes")):
        timeline = simulate(problem, plan)
        state = sum(n.rerun_state_bytes for n in problem.nodes)
        first = problem.backward_order[0]
        held = timeline.bytes_after[count - 1] - problem.nodes[first].grads_before_bytes
        total = sum(getattr(row, name) for row in rows)
        assert total <= held <= total + state
    assert any("{0..3}" in row.where for row in rows), "equal layers are one row"


def test_moves_are_shown_on_both_sides(wrapped: Rockmate, tmp_path: Path) -> None:
    whole = wrapped.plan.problem
    storages = tuple(
        dataclasses.replace(s, is_movable=bool(s.bwd_users) and not (s.is_phantom or s.is_output))
        for s in whole.storages
    )
    link = Link(whole.sizes[0] / whole.base_time_ms, whole.sizes[0] / whole.base_time_ms)
    problem = dataclasses.replace(whole, storages=storages, link=link)
    (one, *_) = [k for k, s in enumerate(storages) if s.is_movable]
    steps = no_recomputation(problem)
    *_, before, last = uses_of_copies(problem, steps)[one][0]
    moves = (Move(one, before, before, last),)
    moved = make_plan(problem, steps, 1 << 30, "by hand", moves=moves)
    found = columns(problem, moved)
    waited = sum(end - begin for begin, end, _ in found.kinds["waiting"])
    assert moved.stall_ms > 0, "a copy takes as long as the step"
    assert waited == pytest.approx(moved.stall_ms)
    assert found.end_ms == pytest.approx(moved.time_ms)
    assert {high for *_, high in found.elsewhere} == {0.0, problem.sizes[one]}
    (row,) = moved_rows(problem, moved)
    assert row.size_bytes == problem.sizes[one]
    assert row.out_ms <= row.gone_ms < row.back_ms
    kept, plain = (module_rows(problem, steps, m) for m in (moves, ()))
    assert sum(r.kept_bytes for r in kept) == sum(r.kept_bytes for r in plain) - row.size_bytes
    report = PlanReport(problem, moved)
    text = Elements(report.html(tmp_path / "moved.html", points=1).read_text(encoding="utf-8"))
    assert {"Moved elsewhere", "waiting", "moved elsewhere"} <= set(text.texts)
    assert "of waiting for copies" in str(report)


def test_a_module_that_keeps_more_than_plain_pytorch_says_so(
    wrapped: Rockmate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ModuleRow("more", 2048, 1024, 0, 0.0), ModuleRow("less", 1024, 2048, 1, 1.0)]
    monkeypatch.setattr(page, "module_rows", lambda *_: rows)
    text = wrapped.plan.html(tmp_path / "plan.html", points=1).read_text(encoding="utf-8")
    assert "2 KiB<br>plain: 1 KiB" in text
    assert "1 KiB<br>of 2 KiB" in text


def test_the_curve_falls_and_stays_above_the_bound(wrapped: Rockmate) -> None:
    problem, plan = wrapped.plan.problem, wrapped.plan.plan
    curve = overhead_curve(problem, plan, points=4)
    budgets = [point.budget_bytes for point in curve]
    assert budgets == sorted(set(budgets))
    assert plan.budget_bytes in budgets
    for before, after in itertools.pairwise(curve):
        assert before.overhead >= after.overhead
        assert before.bound >= after.bound
    for point in curve:
        assert 0 <= point.bound <= point.overhead
        if point.budget_bytes >= plan.peak_bytes:
            assert point.overhead <= plan.overhead
    assert curve[-1].overhead == 0.0
    at_plan = curve[budgets.index(plan.budget_bytes)]
    assert plan.bound_ms is not None
    assert at_plan.bound >= min(at_plan.overhead, plan.bound_ms / plan.base_time_ms - 1) - 1e-9


def test_a_plan_without_nodes_or_recomputation_has_a_page(tmp_path: Path) -> None:
    empty = Problem((), ())
    report = PlanReport(empty, make_plan(empty, (), 1, "none"))
    assert Elements(report.html(tmp_path / "empty.html").read_text()).tags.count("svg") >= 1
    wrapped = wrap(nn.Linear(4, 4), torch.randn(2, 4), "1MiB")
    text = wrapped.plan.html(tmp_path / "all.html").read_text()
    assert "0.00 %" in Elements(text).texts


def test_ticks_are_round_in_their_unit() -> None:
    assert ticks(0, 130, 4, 1.0) == [0, 50, 100]
    assert ticks(0, 3 << 20, 4, float(1 << 20)) == [0, 1 << 20, 2 << 20, 3 << 20]
    assert ticks(5, 5, 4) == [5]
    assert ticks(7.5, 20, 5) == [10, 15, 20]


def test_thin_columns_join_and_keep_their_maximum() -> None:
    columns = [(k / 1000, (k + 1) / 1000, float(k % 7)) for k in range(1000)]
    joined = thinned(columns, 1.0, most=100)
    assert len(joined) <= 2 * 100
    assert max(high for *_, high in joined) == 6.0
    assert joined[0][0] == 0.0
    assert joined[-1][1] == 1.0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(joined))


def test_texts_of_a_chart_are_escaped() -> None:
    chart = Chart('a "b" <c>', 1, 1, str, str, "x & y")
    chart.level(0.5, "budget", "<half>")
    chart.dot((0.9, 0.9), "budget", "a<b")
    drawn = Elements(chart.svg())
    assert {"<half>", "a<b", "x & y"} <= set(drawn.texts)


# ---------------------------------------------------------------------- a real browser

# Runs in the page; what it finds becomes the page's title.
PROBE = """<script>
document.body.style.width = 'WIDTHpx';
const shown = [...document.querySelectorAll('h1,h2,p,td,th,.fact,svg')];
const boxes = shown.map(e => e.getBoundingClientRect());
const outside = [...document.querySelectorAll('svg text')].filter(e => {
  const inner = e.getBoundingClientRect(), outer = e.closest('svg').getBoundingClientRect();
  return inner.left < outer.left - 1 || inner.right > outer.right + 1
      || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
}).map(e => e.textContent);
const fills = [...document.querySelectorAll('svg path:not(.grid)')]
  .map(e => [e.getBBox().width, e.getBBox().height, getComputedStyle(e).fill]);
document.body.dataset.found = JSON.stringify({
  wide: Math.max(...[...document.querySelectorAll('main, section, .fact, svg, .scroll, h1')]
      .map(e => e.getBoundingClientRect().right)), outside, fills,
  scrolls: [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)
      .length,
  empty: boxes.filter(b => b.width < 1 || b.height < 1).length, count: boxes.length,
  text: parseFloat(getComputedStyle(document.querySelector('svg text')).fontSize)
      * document.querySelector('svg').getBoundingClientRect().width / 380,
});
</script>"""


def looked_at(path: Path, folder: Path, width: int) -> dict[str, Any]:
    """Lay the page out this wide, and return what the probe found.

    Windows have a least width, so that a phone's is that of the body.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    probed = folder / f"probed_{width}.html"
    text = path.read_text(encoding="utf-8")
    probe = PROBE.replace("WIDTH", str(width))
    probed.write_text(text.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    run = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--window-size={max(width, 500)},1600",
            ),
            *(f"--user-data-dir={folder / 'profile'}", probed.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in run.stderr, run.stderr
    found = re.search(r'data-found="([^"]*)"', run.stdout)
    assert found is not None, run.stdout[-2000:]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


@pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason=f"no browser is installed ({', '.join(BROWSERS)})"
)
@pytest.mark.parametrize("width", [360, 1100])
def test_a_browser_shows_all_of_the_page(path: Path, tmp_path: Path, width: int) -> None:
    found = looked_at(path, tmp_path, width)
    assert width - 40 <= found["wide"] <= width, "nothing is wider than the screen"
    assert found["scrolls"] <= 1, "only the table of planners may have to be moved"
    assert found["outside"] == []
    assert found["empty"] == 0
    assert found["count"] > 30
    assert found["text"] >= 9, "text in charts can be read"
    assert len({fill for *_, fill in found["fills"]}) >= 3
    assert all(wide > 0 and high > 0 for wide, high, _ in found["fills"])


def test_the_page_says_where_it_was_planned_and_what_its_words_mean(wrapped: Rockmate) -> None:
    report = wrapped.plan
    said = html.unescape(" ".join(Elements(page.page(report, [])).texts))
    assert f"torch {torch.__version__}" in said
    assert "inputs float32[64, 32]" in said
    assert "What the words mean" in said
    assert re.search(r"forward at [\d.]+ (ms|%): [\d.]+ [KM]?i?B", said), "under the pointer"


def test_flops_are_no_milliseconds_on_the_page() -> None:
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    report = wrap(nn.Sequential(*layers), torch.randn(64, 32), 0.6, cost="flops").plan
    said = " ".join(Elements(page.page(report, [])).texts)
    assert "run again" in said
    assert re.search(r"\d (ms|us)\b", said) is None


def test_the_text_of_a_tick_at_the_end_is_not_cut_off() -> None:
    chart = Chart("chart", 100.0, 1.0, lambda x: f"{x:g} MiB", str, "budget")
    chart.line([(0.0, 0.0), (100.0, 1.0)], "plans")
    ends = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">100 MiB', chart.svg())
    assert ends == [("379.00", "end")]


def test_small_rows_of_modules_are_folded(wrapped: Rockmate) -> None:
    rows = [ModuleRow(f"layer {k}", 1024, 2048, 1, 1.0) for k in range(20)]
    text = page._modules_section(rows, True)
    assert "<summary>12 more</summary>" in text
    assert Elements(text).tags.count("tr") == 20 + 2
