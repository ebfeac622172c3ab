"""Put the committed results into READMEs and a page, between markers, so that none is typed.

$ python -m reports.report            # rewrite them
$ python -m reports.report --check    # fail when one would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reports import tables
from reports.readme import with_part
from steps.table import step_table

ROOT = Path(__file__).resolve().parents[2]


def page_results(results: Path) -> str:
    """Return what the documentation shows: the demo, the peers, how much larger a batch fits."""
    demo = (results / "demo.md").read_text(encoding="utf-8")
    parts = {
        "Plain and in half to two thirds of the memory": "What `make demo` gives on a CPU, all "
        f"memory of a step counted:\n\n{demo}",
        "Whole steps within `memory=`": "Ten networks by AdamW and SGD, all parameters at once and "
        "one by one, each with four loops (one batch, three\nmicro-batches, zeros in gradients, an "
        "average of the weights). Where nothing is recomputed, activations\nneed no more.\n\n"
        + tables.whole_step_table(results),
        "Beside other ways to save memory": "An 8-layer GPT: the peers that are best for their "
        "peak, and Rockmate with that peak as its budget\n(over plain PyTorch).\n\n"
        + tables.peers_table(results),
        "At checkpoint's own peak, and at the smallest budget": "Peaks as shares of plain "
        "PyTorch's, and times over a plain step.\n\n" + tables.low_table(results),
        "Planned blocks by depth": "`apply_to_blocks` beside a checkpoint around every layer of "
        "GPT-2, 4 to 96 of them.\n\n" + tables.low_table(results, "blocks"),
        "Moves, beside offload by hand": "Two networks at the peaks of what people write by hand: "
        "hooks on saved tensors, and checkpoints whose\ninputs are moved. Each peak is a budget of "
        "Rockmate's.\n\n" + tables.offload_table(results),
        "Pieces of rows, beside loops by hand": "Each network at the smallest budget without "
        "pieces, with exact ones and with others, at goals, and at the\npeak of what people write "
        "by hand (`benchmarks/split.py`).\n\n" + tables.split_table(results),
        "Larger batches": "In the memory that plain PyTorch needs for a small one:\n\n"
        + tables.throughput_table(results),
    }
    found = {title: text for title, text in parts.items() if not text.endswith("\n\n")}  # no rows
    return "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in found.items())


def benchmark_results(results: Path) -> str:
    """Return what the README of the benchmarks shows."""
    found = {
        "Performance": tables.performance_table(results),
        "At checkpoint's own peak, and at the smallest budget": tables.low_table(results),
        "Planned blocks by depth": tables.low_table(results, "blocks"),
        "Compiled pieces and `torch.compile`": tables.compiled_table(results),
        "Planning": tables.planning_table(results),
        "Phases of planning": tables.phases_table(results),
        "Planning of many packages' models": tables.models_table(results),
        "What the executor costs": step_table(results),
        "FLOPs of an 8-layer GPT at fifteen budgets": tables.front_table(results),
        "Throughput": tables.throughput_table(results),
        "Peers": tables.peers_table(results),
        "Moves, and offload by hand": tables.offload_table(results),
        "Pieces of rows": tables.split_table(results),
    }
    parts = [f"### {title}\n\n{text.strip()}" for title, text in found.items() if text]
    return "\n\n".join(parts) or "Nothing has been measured yet: `make bench`."


def main() -> int:
    """Rewrite the READMEs, or say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    results = ROOT / "benchmarks/results"
    late = 0
    for readme, text in (
        (ROOT / "README.md", tables.peers_table(results).strip()),
        (ROOT / "docs/measured.md", page_results(results)),
        (ROOT / "benchmarks/README.md", benchmark_results(results)),
    ):
        old = readme.read_text(encoding="utf-8")
        new = with_part(old, "results", text)
        if check and new != old:
            where = readme.relative_to(ROOT)
            print(f"{where}: its tables differ from benchmarks/results", file=sys.stderr)
            late = 1
        if not check:
            readme.write_text(new, encoding="utf-8")
    return late


if __name__ == "__main__":
    sys.exit(main())
