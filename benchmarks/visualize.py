"""Draw every figure from the rows in `results/`, and from nothing else.

    $ python benchmarks/visualize.py                  # results/*.csv -> results/figures/*.png
    $ python benchmarks/visualize.py --results DIR --out DIR

One picture per experiment, device and size; what was measured nowhere is not drawn. Needs
matplotlib (`pip install 'rockmate[plot]'`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures.lengths import draw_lengths
from figures.options import draw_options
from figures.overhead import draw_overhead
from figures.peers import draw_peers
from figures.planning import draw_planning
from figures.style import ok, stamp
from figures.throughput import draw_throughput
from figures.timeline import draw_timeline
from harness.experiment import RESULTS, read_rows
from harness.points import Row
from steps.figure import draw_step

FIGURES: dict[str, tuple[str, Callable[[list[Row]], Figure]]] = {
    "overhead": ("performance", draw_overhead),
    "compiled": ("compiled", draw_overhead),
    "planning": ("planning", draw_planning),
    "timeline": ("timeline", draw_timeline),
    "throughput": ("throughput", draw_throughput),
    "options": ("options", draw_options),
    "peers": ("peers", draw_peers),
    "step": ("step", draw_step),
    "lengths": ("lengths", draw_lengths),
}


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by where and at which size they were measured, under a suffix for files.

    Rows of the smallest sizes are drawn only where there are no others.
    """
    if any(row["size"] != "smoke" for row in rows):
        rows = [row for row in rows if row["size"] != "smoke"]
    found: dict[str, list[Row]] = {}
    for row in rows:
        device = "" if row["device"].startswith("cpu") else re.sub(r"\W+", "-", row["device"])
        size = "" if row["size"] == "cpu" else row["size"]
        found.setdefault("-".join(part.strip("-") for part in (device, size) if part), []).append(
            row
        )
    return found


def draw_all(results: Path, out: Path, only: Iterable[str] = FIGURES) -> list[Path]:
    """Draw the figures that there are rows for; return the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in only:
        table, draw = FIGURES[name]
        for suffix, rows in groups(read_rows(results / f"{table}.csv")).items():
            if not ok(rows):
                continue
            figure = draw(rows)
            stamp(figure, rows)
            path = out / f"{name}{'-' if suffix else ''}{suffix}.png"
            figure.savefig(path, dpi=130)
            plt.close(figure)
            written.append(path)
    return written


def main() -> int:
    """Draw, and say what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="default: figures/ in the results")
    flags = parser.parse_args()
    written = draw_all(flags.results, flags.out or flags.results / "figures")
    for path in written:
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    if not written:
        print(f"no rows in {flags.results}: run the experiments first", file=sys.stderr)
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
