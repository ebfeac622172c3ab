"""The door: search for a time, print what was found, exit with 1 if it is wrong.

$ python -m fuzz --minutes 10 --seed 0           # what `make fuzz` runs
$ python -m fuzz --case 17                       # one case, with its script
$ python -m fuzz --case 17 --shrink              # the same, as short as it gets
$ python -m fuzz --minutes 10 --only "spectral norm"  # cases with one of these forms
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fuzz.campaign import Found, Tally, found_small, search, verdict_of
from fuzz.drawing import draw_case
from fuzz.known import KNOWN
from fuzz.place import run_on
from fuzz.script import script_of


def main() -> int:
    """Return 1 if something is silently wrong, raw or over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--cases", type=int, default=None, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="the first case's; others follow")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where cases run")
    parser.add_argument("--case", type=int, default=None, help="run this one alone")
    parser.add_argument("--shrink", action="store_true", help="make it small")
    parser.add_argument("--out", type=Path, default=None, help="a folder for the scripts")
    parser.add_argument("--without", nargs="*", default=(), help="leave these forms out")
    parser.add_argument("--only", nargs="*", default=(), help="cases with one of these forms")
    parser.add_argument("--all", action="store_true", help="look for known faults, too")
    asked = parser.parse_args()
    without = {*asked.without, *(() if asked.all else KNOWN)}
    if asked.case is not None:
        run_on(asked.device)
        return _one(asked.case, shrinks=asked.shrink)
    if asked.minutes is None and asked.cases is None:
        asked.minutes = 1.0

    def tell(found: Found) -> None:
        print(f"seed {found.seed}: {found.verdict}\n\n{indented(found.script)}", flush=True)
        if asked.out is not None and found.script:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / f"seed{found.seed}.py").write_text(found.script, encoding="utf-8")

    tally = search(
        seed=asked.seed,
        minutes=asked.minutes,
        cases=asked.cases,
        processes=asked.processes,
        device=asked.device,
        without=without,
        only=asked.only,
        tell=tell,
    )
    print(report(tally))
    for name in KNOWN.keys() & without:
        print(f"  left out: '{name}': {KNOWN[name]}")
    return 1 if tally.found or tally.broken else 0


def _one(seed: int, *, shrinks: bool) -> int:
    case = draw_case(seed)
    verdict = verdict_of(case, f"case{seed}.py")
    script = script_of(case, f"{verdict}\n\nSeed {seed}.")
    print(found_small(case, verdict, seed).script if shrinks and verdict.is_wrong else script)
    print(f"seed {seed}: {verdict}", file=sys.stderr)
    return int(verdict.is_wrong)


def report(tally: Tally) -> str:
    """Return what a search has seen, in lines."""
    counts = ", ".join(f"{count} {kind}" for kind, count in tally.kinds.most_common())
    lines = [f"fuzz: {tally.cases} cases in {tally.seconds:.0f} s: {counts}"]
    lines += [f"  refused {count} times: {text}" for text, count in tally.refusals.most_common(12)]
    lines += [f"  plain PyTorch cannot run {text}" for text in tally.broken]
    for found in sorted(tally.found, key=lambda found: -found.count):
        lines.append(f"  {found}")
    return "\n".join(lines)


def indented(text: str) -> str:
    """Return a text as part of another one."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
