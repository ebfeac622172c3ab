"""The report of a plan and its problem, which is `rk.plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rockmate.reports.page import PlanFacts, page, snippet
from rockmate.schedules.baselines import keeping_all_bytes
from rockmate.schedules.report import format_bytes, format_plan


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """The compiled part of a plan; `eager` has (module path, operations, why) of other nodes."""

    nodes: int
    compiled: int
    classes: int
    compiled_now: int  # classes that are new in this process
    seconds: float  # of compilation, or of looking classes up
    eager: tuple[tuple[str, str, str], ...]
    agreement: str  # result of the comparison with eager in the self-test; '' without one
    keeping: int = 0  # nodes that save what others recompute in their backward

    def __str__(self) -> str:
        lines = [
            f"compiled: {self.compiled} of {self.nodes} nodes, of {self.classes} kinds, "
            f"{self.compiled_now} of them now, in {self.seconds:.1f} s"
        ]
        if self.keeping:
            lines.append(f"  {self.keeping} of them keep norms and the like for their backward")
        if self.agreement:
            lines.append(f"  {self.agreement}")
        kinds: dict[tuple[str, str], list[str]] = {}
        for path, name, why in self.eager:
            kinds.setdefault((name, why), []).append(path or "(root)")
        for (name, why), paths in kinds.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            lines.append(f"  eager: {name} in {paths[0]}{more}: {why}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PlanReport(PlanFacts):
    """The plan of a module; it also has the attributes of its `Plan`."""

    program: str = ""  # the generated program, for people
    compiled: CompiledPart | None = None  # with compile=True
    cut: tuple[str, ...] = ()  # parts that run in pieces of rows, and their agreement with eager

    @property
    def opaque(self) -> tuple[str, ...]:
        """Paths of the submodules that are opaque calls, because they could not be recorded."""
        return tuple(dict.fromkeys(piece.path for piece in self.pieces))

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

    def summary(self) -> str:
        """Return one line: the peak (measured if it was), the budget, and the extra time.

        Examples:
            >>> print(rk.plan.summary())
            peak 60.43 MiB within 60.61 MiB, without recomputation 121.22 MiB; 16.67 % more time
        """
        measured = self.measured_peak_bytes
        peak = self.plan.peak_bytes if measured is None else measured
        everything = keeping_all_bytes(self.problem)
        return (
            f"peak {format_bytes(peak)} within {format_bytes(self.plan.budget_bytes)}, without "
            f"recomputation {format_bytes(everything)}; {self.overhead_percent:.2f} % more time"
        )

    def html(self, path: str | Path, *, points: int = 7) -> Path:
        """Write one self-contained page about the plan, and return its path.

        It shows memory over the step, kept bytes and recomputations by module, extra time over
        budget with its lower bound, planning by phase, and opaque calls. `points` is the number of
        budgets of the curve (about half a second each for 150 nodes); 0 leaves it out.

        Examples:
            >>> rk.plan.html("plan.html")
        """
        from rockmate.reports.curve import overhead_curve

        curve = overhead_curve(self.problem, self.plan, points=points) if points else []
        path = Path(path)
        text = page(self, curve)
        path.write_text(text, encoding="utf-8")
        return path

    def plot(self) -> Any:
        """Return memory over the step as a figure of matplotlib (extra: `rockmate[plot]`).

        Examples:
            >>> rk.plan.plot().savefig("plan.png")
        """
        from rockmate.reports.curve import memory_figure

        return memory_figure(self.problem, self.plan)

    def _repr_html_(self) -> str:
        return snippet(self)

    def __getattr__(self, name: str) -> Any:
        # copy.copy asks for special methods before there is a plan; the plan's would be wrong.
        if name.startswith("__") or "plan" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.plan, name)

    def __repr__(self) -> str:
        return f"<plan of {self.name}: {self.summary()}>"

    def __str__(self) -> str:
        text = format_plan(self.problem, self.plan, is_timed=self.is_timed)
        compiled = [] if self.compiled is None else [str(self.compiled)]
        return "\n".join([text, *map(str, self.pieces), *compiled, *self.cut])
