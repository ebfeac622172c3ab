"""A plan together with the problem it solves: what `rk.plan` is, and prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rockmate.plan import Plan
from rockmate.problem import Problem


@dataclass(frozen=True)
class PlanReport:
    """The plan of a module; attributes are the plan's own."""

    problem: Problem
    plan: Plan
    program: str = ""  # the generated program, for people

    def source(self) -> str:
        """Return the program that runs a step: Python, with module paths as comments."""
        return self.program

    @property
    def overhead_percent(self) -> float:
        """Planned recomputation, in percent of a step without any."""
        return 100 * self.plan.overhead

    def save(self, path: str | Path) -> None:
        """Write the plan to one JSON file."""
        self.plan.save(path)

    def __getattr__(self, name: str) -> Any:
        # A copy asks for special methods before it has a plan, and the plan's would not fit here.
        if name.startswith("__") or "plan" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.plan, name)

    def __str__(self) -> str:
        from rockmate.report import format_plan

        return format_plan(self.problem, self.plan)
