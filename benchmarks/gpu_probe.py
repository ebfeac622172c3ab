"""What holds on a GPU, in two calls of less than nine minutes each: versions, allocator, times,
bits, budgets, and then plans under other settings, and tests.

    $ make gpu CALL=1 && make gpu CALL=2
    $ python benchmarks/gpu_probe.py --device cpu --tiny     # to see that it runs
    $ python benchmarks/gpu_probe.py --only matrix ballast

Rows go to results/DEVICE/probe.jsonl, one JSON object a line, as they are made; a table is printed
at the end, and what failed below it. Torch must be there, and no network: see docs/how-to/gpu.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from probe.run import folder_of, run_all
from probe.table import failures, read, table
from probe.wheels import find_packages


def main(argv: Sequence[str]) -> int:
    """Run the probe; return 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="networks of moments")
    parser.add_argument("--call", type=int, choices=(1, 2), help="one half of the sections")
    parser.add_argument("--only", nargs="*", help="some sections")
    parser.add_argument("--rows", type=Path, help="file of the rows; call 2 adds to it")
    parser.add_argument("--wheels", type=Path, help="folder of packages that are not installed")
    flags = parser.parse_args(argv)
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no GPU here; --device cpu --tiny shows that the probe runs")
        return 2
    find_packages(flags.wheels)
    from probe.sections import SECTIONS  # they need the packages

    name = torch.cuda.get_device_name(flags.device) if flags.device != "cpu" else "cpu"
    rows = flags.rows or folder_of(name) / "probe.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    if flags.call != 2:
        rows.unlink(missing_ok=True)
    chosen = [s for s in SECTIONS if flags.only is None or s.name in flags.only]
    chosen = [s for s in chosen if flags.call in (None, s.call)]
    run_all(
        [(section.name, section.limit_s, section.expandable) for section in chosen],
        flags.device,
        rows,
        tiny=flags.tiny,
    )
    found = read(rows)
    print(table(found))
    wrong = failures(found)
    print("\n" + ("\n".join(["what failed:", *wrong]) if wrong else "nothing failed"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
