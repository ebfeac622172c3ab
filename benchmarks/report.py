"""Put the committed results into the README, between its markers, so that no figure is typed.

$ .venv/bin/python benchmarks/report.py            # rewrite the README
$ .venv/bin/python benchmarks/report.py --check    # fail when it would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"


def with_results(readme: str, results: str) -> str:
    """Return the README with the text between its markers replaced."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README must hold {BEGIN.strip()} and {END.strip()} once each")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{results.strip()}\n\n{END}{after}"


def main() -> int:
    """Rewrite the README, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    results = (ROOT / "benchmarks/results/demo.md").read_text(encoding="utf-8")
    new = with_results(old, results)
    if check and new != old:
        print("README.md: the table differs from benchmarks/results/demo.md", file=sys.stderr)
        return 1
    if not check:
        readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
