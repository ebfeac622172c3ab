"""Pictures are whole: what is drawn lies inside what a viewer shows, at the size of its fonts."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rkgb

COMMITTED = sorted((Path(__file__).parents[2] / "pictures").glob("*.svg"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PIXELS_PER_POINT = 96 / 72  # by the definition of CSS

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="the program dot (Graphviz) is not installed"
)
needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason=f"no browser is installed ({', '.join(BROWSERS)})"
)


@pytest.fixture(scope="module")
def result() -> rkgb.RkgbResult:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    return rkgb.make_all_graphs(model, torch.randn(3, 8), cost="flops")


@pytest.fixture(scope="module")
def new_pictures(
    result: rkgb.RkgbResult, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("pictures")
    return {
        ending: rkgb.print_all_graphs(result, "new", render_format=ending, folder=folder)
        for ending in ("svg", "png", "pdf")
    }


def numbers(text: str | None) -> list[float]:
    return [float(number) for number in NUMBER.findall(text or "")]


def corners(element: ET.Element) -> list[tuple[float, float]]:
    """Points that the element reaches, as far as the file alone says (texts: where they stand)."""
    kind = element.tag.rpartition("}")[2]
    if kind == "ellipse":
        x, y, wide, high = (float(element.attrib[name]) for name in ("cx", "cy", "rx", "ry"))
        return [(x - wide, y - high), (x + wide, y + high)]
    if kind == "text":
        return [(float(element.attrib["x"]), float(element.attrib["y"]))]
    flat = numbers(element.get("d" if kind == "path" else "points"))
    return list(zip(flat[::2], flat[1::2], strict=True))


def drawn(
    element: ET.Element, scale: float = 1.0, shift: tuple[float, float] = (0.0, 0.0)
) -> Iterator[tuple[float, float]]:
    """All points that are drawn, in units of viewBox."""
    transform = element.get("transform", "")
    for kind, arguments in re.findall(r"(\w+)\(([^)]*)\)", transform):
        given = numbers(arguments)
        if kind == "translate":
            shift = (shift[0] + scale * given[0], shift[1] + scale * given[1])
        elif kind == "scale":
            assert len(set(given)) == 1
            scale *= given[0]
        else:
            assert (kind, given) == ("rotate", [0.0])
    for x, y in corners(element):
        yield scale * x + shift[0], scale * y + shift[1]
    for child in element:
        yield from drawn(child, scale, shift)


def check_extent(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    left, top, width, height = numbers(root.attrib["viewBox"])
    points = list(drawn(root))
    assert len(points) > 50
    assert min(x for x, _ in points) >= left - 0.01
    assert min(y for _, y in points) >= top - 0.01
    assert max(x for x, _ in points) <= left + width + 0.01
    assert max(y for _, y in points) <= top + height + 0.01
    # One unit is one point, so that texts have the size that their fonts say.
    assert [root.attrib["width"][-2:], root.attrib["height"][-2:]] == ["pt", "pt"]
    assert float(root.attrib["width"][:-2]) == pytest.approx(width, abs=1)
    assert float(root.attrib["height"][:-2]) == pytest.approx(height, abs=1)


@needs_dot
def test_what_is_drawn_lies_inside_the_view_box(new_pictures: dict[str, list[Path]]) -> None:
    for picture in new_pictures["svg"]:
        check_extent(picture)


@pytest.mark.parametrize("picture", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_pictures_are_whole(picture: Path) -> None:
    check_extent(picture)


def test_the_readme_has_committed_pictures() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(pictures/(\S+\.svg)\)", readme)
    assert sorted(shown) == [picture.name for picture in COMMITTED]


def page_size(pdf: Path) -> list[float]:
    """Width and height of the page, in points; some writers compress where it stands."""
    text = pdf.read_bytes()
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", text, re.DOTALL):
        with contextlib.suppress(zlib.error):
            text += zlib.decompressobj().decompress(stream)
    page = re.search(rb"/MediaBox *\[ *0 0 ([\d.]+) ([\d.]+) *\]", text)
    assert page is not None
    return [float(number) for number in page.groups()]


@needs_dot
def test_other_formats_have_the_size_of_the_same_drawing(
    new_pictures: dict[str, list[Path]],
) -> None:
    for svg, png, pdf in zip(*new_pictures.values(), strict=True):
        _, _, width, height = numbers(ET.parse(svg).getroot().attrib["viewBox"])
        # A pixel picture cannot be enlarged, so it has 110 pixels an inch.
        pixels = struct.unpack(">II", png.read_bytes()[16:24])
        assert pixels == pytest.approx((width * 110 / 72, height * 110 / 72), abs=2)
        margins = 2 * 36  # of half an inch, by some versions of Graphviz
        for page, natural in zip(page_size(pdf), (width, height), strict=True):
            assert natural - 2 <= page <= natural + margins + 2


# Reports what a browser lays out, in pixels; `seen` is what it does not clip.
PAGE = """<!DOCTYPE html><meta charset="utf-8"><body style="margin: 0">%s<pre id="answer"></pre>
<script>
const svg = document.querySelector("svg"), seen = svg.getBoundingClientRect();
const outside = [], scales = new Set();
let count = 0;
for (const element of svg.querySelectorAll("polygon, polyline, path, ellipse, text")) {
  const box = element.getBoundingClientRect();
  count += 1;
  scales.add(element.getScreenCTM().a);
  if (box.left < seen.left - 0.5 || box.right > seen.right + 0.5
      || box.top < seen.top - 0.5 || box.bottom > seen.bottom + 0.5)
    outside.push(element.textContent || element.tagName);
}
document.getElementById("answer").textContent =
  JSON.stringify({count, outside, scales: [...scales]});
</script>"""


def laid_out(picture: Path, folder: Path) -> dict[str, object]:
    """Return what a real browser says about the elements of a picture."""
    svg = picture.read_text(encoding="utf-8")
    page = folder / "page.html"
    page.write_text(PAGE % svg[svg.index("<svg") :], encoding="utf-8")
    browser = next(path for path in map(shutil.which, BROWSERS) if path is not None)
    command = [browser, "--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    # Containers run tests as root, for whom browsers have no sandbox; the page is our own.
    command += ["--no-sandbox", "--disable-dev-shm-usage", "--dump-dom", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', run.stdout, re.DOTALL)
    assert answer is not None, run.stderr[-1000:]
    found: dict[str, object] = json.loads(answer[1].replace("&amp;", "&"))
    return found


def check_in_browser(picture: Path, folder: Path) -> None:
    found = laid_out(picture, folder)
    assert isinstance(found["count"], int)
    assert found["count"] > 20
    assert found["outside"] == []
    # Graphviz rounds the width and not the viewBox, hence one percent.
    assert found["scales"] == pytest.approx([PIXELS_PER_POINT], rel=0.01)


@needs_dot
@needs_browser
def test_a_browser_shows_all_of_a_new_picture(
    new_pictures: dict[str, list[Path]], tmp_path: Path
) -> None:
    check_in_browser(new_pictures["svg"][0], tmp_path)


@needs_browser
@pytest.mark.parametrize("picture", COMMITTED, ids=lambda path: path.stem)
def test_a_browser_shows_all_of_the_committed_pictures(picture: Path, tmp_path: Path) -> None:
    check_in_browser(picture, tmp_path)
