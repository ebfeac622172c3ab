"""Fail when a test was skipped for a reason that CI does not accept.

Reads the JUnit report of a pytest run. A machine may lack a GPU, a web browser, a commercial solver
and its licence; it must not lack the open-source solvers, so a skip that names none of the accepted
reasons is a failure, and so is a run without a passed test of each open-source solver.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

ACCEPTED = re.compile(
    r"\b(bitsandbytes|browser|cuda|gpu|diffusers|gurobi|gurobipy|jsonargparse|torchtitan|torchvision|trl)\b",
    re.IGNORECASE,
)
REQUIRED = {
    "CBC": re.compile("cbc", re.IGNORECASE),
    "CP-SAT": re.compile("cp[_-]?sat", re.IGNORECASE),
    "HiGHS": re.compile("highs", re.IGNORECASE),
}


def problems(report: Path) -> Iterator[str]:
    """Yield one line per unaccepted skip and per solver whose tests did not run."""
    passed = set[str]()
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if skip is None:
            passed.add(name)
        elif skip.get("type") != "pytest.xfail" and not ACCEPTED.search(skip.get("message", "")):
            yield f"{name} was skipped: {skip.get('message')}"
    for solver, pattern in REQUIRED.items():
        if not any(pattern.search(name) for name in passed):
            yield f"no test of {solver} passed (none has {pattern.pattern!r} in its name)"


def main(report: str) -> int:
    """Print what is wrong and return 1, or return 0."""
    found = list(problems(Path(report)))
    for problem in found:
        print(f"skips: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
