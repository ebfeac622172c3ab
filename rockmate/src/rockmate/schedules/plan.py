"""A plan: a sequence of steps with its costs, its planner, and a bound on the optimum."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rockmate.errors import InvalidPlanError
from rockmate.problems.problem import Problem
from rockmate.problems.rows import from_row, parse, row_of
from rockmate.schedules.moves import Moves
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps

_FORMAT = 1  # increased when plans of an older version can no longer be read


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one planner for a budget, kept for the report."""

    planner: str
    seconds: float
    overhead_ms: float | None = None  # None: it found no plan that fits
    peak_bytes: int | None = None
    note: str = ""  # "optimal", "time limit", why it was skipped, …


@dataclass(frozen=True, slots=True)
class OpaquePiece:
    """A submodule that is an opaque call, with its memory and time on the sample."""

    path: str
    kind: str
    held_bytes: int
    time_ms: float

    def __str__(self) -> str:
        return (
            f"opaque: '{self.path or '(root)'}' ({self.kind}) runs whole; the sample's run held "
            f"{self.held_bytes} bytes for its backward and took {self.time_ms:.2f} ms"
        )


@dataclass(frozen=True)
class Plan:
    """Steps that fit a budget, with their exact predicted peak and overhead.

    `bound_ms` is a proven lower bound on the step time (base and overhead) of *every* schedule
    within the budget, or None if no bound was computed.
    """

    steps: Steps
    budget_bytes: int
    peak_bytes: int
    overhead_ms: float
    base_time_ms: float
    planner: str
    fingerprint: str
    tried: tuple[Trial, ...] = ()
    bound_ms: float | None = None
    status: str = "feasible"  # or "optimal": `bound_ms` meets the plan's own time
    plan_seconds: float = 0.0
    moves: Moves = ()  # storages that are elsewhere for some steps
    stall_ms: float = 0.0  # part of the overhead: waiting for them

    def __repr__(self) -> str:
        return (
            f"<plan of {len(self.steps)} steps: peak {self.peak_bytes} of {self.budget_bytes} "
            f"bytes, {100 * self.overhead:.2f} % more time>"
        )

    @property
    def time_ms(self) -> float:
        """Predicted time of one step, recomputation included."""
        return self.base_time_ms + self.overhead_ms

    @property
    def overhead(self) -> float:
        """Recomputation as a fraction of the base time: 0.12 is 12 % more."""
        return self.overhead_ms / self.base_time_ms if self.base_time_ms else 0.0

    @property
    def gap(self) -> float | None:
        """The largest possible excess of the step time over the optimum, as a fraction, or None."""
        if self.bound_ms is None:
            return None
        return max(0.0, self.time_ms / self.bound_ms - 1) if self.bound_ms else 0.0

    def with_steps(self, problem: Problem, steps: Steps, moves: Moves = ()) -> Plan:
        """Return the same plan with other steps and moves, and what these take."""
        timeline = simulate(problem, steps, moves)
        return dataclasses.replace(
            self,
            steps=steps,
            moves=moves,
            peak_bytes=timeline.peak_bytes,
            overhead_ms=timeline.overhead_ms,
            stall_ms=timeline.stall_ms,
        )

    def check(self, problem: Problem) -> None:
        """Check the plan against a problem, from its steps alone.

        Raises:
            InvalidPlanError: it was made for another network, its steps are out of order, or its
                peak is not within its budget.
        """
        if self.fingerprint != problem.fingerprint:
            raise InvalidPlanError(
                f"the plan was made for a network with fingerprint {self.fingerprint}, this one "
                f"has {problem.fingerprint}: nodes or sizes differ; plan this network anew"
            )
        simulate(problem, self.steps, self.moves, budget_bytes=self.budget_bytes)

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` gives an equal plan back."""
        data = row_of(self)
        if not self.moves:  # as plans without moves have always been written
            del data["moves"], data["stall_ms"]
        return json.dumps({"rockmate_plan": _FORMAT, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            InvalidPlanError: the text is not a plan of this version.
        """
        data = parse(text)
        version = data.pop("rockmate_plan", None) if isinstance(data, dict) else None
        if version != _FORMAT:
            raise InvalidPlanError(
                f"expected a plan in format {_FORMAT}, found format {version!r}; "
                f"save it again with this version of rockmate"
            )
        return from_row(cls, data, "plan")

    def save(self, path: str | Path) -> None:
        """Write the plan to one JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, problem: Problem | None = None) -> Plan:
        """Read a plan from a file, and check it against `problem` if one is given."""
        plan = cls.from_json(Path(path).read_text(encoding="utf-8"))
        if problem is not None:
            plan.check(problem)
        return plan


def make_plan(
    problem: Problem, steps: Steps, budget_bytes: int, planner: str, moves: Moves = (), **rest: Any
) -> Plan:
    """Return the plan of some steps, with peak and overhead from the exact simulator.

    Raises:
        InvalidPlanError: the steps are out of order or above the budget.
    """
    timeline = simulate(problem, steps, moves, budget_bytes=budget_bytes)
    fields: Mapping[str, Any] = rest
    return Plan(
        steps=tuple(steps),
        budget_bytes=budget_bytes,
        peak_bytes=timeline.peak_bytes,
        overhead_ms=timeline.overhead_ms,
        base_time_ms=problem.base_time_ms,
        planner=planner,
        fingerprint=problem.fingerprint,
        moves=tuple(moves),
        stall_ms=timeline.stall_ms,
        **fields,
    )
