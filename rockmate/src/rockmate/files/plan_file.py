"""The content of a plan file: for each planned call its problem, its steps, and its measurements.

    {"rockmate_plans": 1, "checksum": "…", "content": {"model": …, "made_with": …, "plans": […]}}

A plan of blocks has an entry "blocks" instead of plans, with the options and the choice among them.
Wherever such a file is used, blocks are recorded again and a whole step is measured; only the
search and the measurement of times are skipped.

Wherever a plan is used, the network is recorded again, and its sizes and structure are compared
with the problem in the file. Only times and workspaces of kernels are taken from the file. The
checksum detects files that were truncated or edited, but does not protect against an attacker. An
attacker can make a plan slower, or its predicted peak too small, and nothing else: steps out of
order are refused, and operations come from the recording.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from rockmate.errors import InvalidPlanError, PlanFileError
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.problems.rows import all_finite, from_row, parse, row_of
from rockmate.schedules.moves import Move
from rockmate.schedules.plan import OpaquePiece, Plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step

FORMAT = 1  # increased when files of an older version can no longer be read


@dataclass(frozen=True, slots=True)
class KindCost:
    """The cost of one call of one kind of operation."""

    time_ms: float
    flops: int
    workspace_bytes: int

    def __post_init__(self) -> None:
        # What frees or reuses its arguments takes less than nothing beside its results.
        if not all_finite((self.time_ms, self.flops, abs(self.workspace_bytes))):
            raise ValueError(f"a cost below zero: {self}")


@dataclass(frozen=True, slots=True)
class SavedCut:
    """What of a step is cut in pieces of rows, as `rkgb.rows.Cut`."""

    count: int
    most: int | None
    alone: tuple[int, ...]
    is_exact: bool

    def __post_init__(self) -> None:
        if not all_finite((self.count - 2, self.most or 0, *self.alone)):
            raise ValueError(f"no pieces of rows: {self}")


@dataclass(frozen=True)
class SavedPlan:
    """One planned call, ready to be used again.

    `recording` is a digest of the recorded step: operations, shapes, and data flow.
    """

    recording: str
    inputs: tuple[str, ...]  # in words, for messages
    problem: Problem
    plan: Plan
    costs: Mapping[str, KindCost]  # by digest of the kind of operation
    unsteady: tuple[str, ...]  # nondeterministic kinds: other bits at a second call
    spread: float
    device_ms: float
    host_ms: float
    budget_bytes: int
    blocks_bytes: int
    eager_peak_bytes: int | None
    measured_peak_bytes: int | None
    comparison: str
    pieces: tuple[OpaquePiece, ...] = ()
    cut: SavedCut | None = None  # the problem, the plan and the costs are of its pieces
    whole_ms: float | None = None  # the time without them

    def __post_init__(self) -> None:
        numbers = (self.spread, self.device_ms, self.host_ms, self.budget_bytes, self.blocks_bytes)
        peaks = (self.eager_peak_bytes or 0, self.measured_peak_bytes or 0)
        if not all_finite((*numbers, *peaks, self.whole_ms or 0)):
            raise ValueError("a time or a size below zero")
        _check_plan(self.problem, self.plan)


@dataclass(frozen=True, slots=True)
class SavedKind:
    """Equal blocks: the shape of their problem, and their options."""

    nodes: int
    backward_order: tuple[int, ...]
    options: tuple[tuple[Step, ...], ...]
    cuts: tuple[SavedCut | None, ...] | None = None  # of each option, if some are in pieces
    moves: tuple[tuple[Move, ...], ...] | None = None  # of each option, if some move storages

    def __post_init__(self) -> None:
        for found in (self.cuts, self.moves):
            if found is not None and len(found) != len(self.options):
                raise ValueError("not each option has its pieces, or its moves")


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """One block: the numbers of its kind and its option, and its measured times."""

    path: str
    kind: int
    option: int
    overhead_ms: float
    base_time_ms: float


@dataclass(frozen=True)
class SavedBlocks:
    """A plan of blocks: the options of each kind of block, and the choice."""

    kinds: tuple[SavedKind, ...]
    blocks: tuple[SavedBlock, ...]
    budget_bytes: int
    in_flight: int
    free_overhead_ms: float | None = None  # of a plan of the whole model
    link: Link | None = None  # over which blocks may move storages

    def __post_init__(self) -> None:
        for block in self.blocks:
            if not 0 <= block.kind < len(self.kinds):
                raise ValueError(f"'{block.path}' is of a kind that is not there")
            if not 0 <= block.option < len(self.kinds[block.kind].options):
                raise ValueError(f"'{block.path}' has an option that is not there")
            if not all_finite((block.overhead_ms, block.base_time_ms)):
                raise ValueError("a time below zero")
        if not self.blocks or self.budget_bytes < 1 or self.in_flight < 1:
            raise ValueError("there is no plan in it")


@dataclass(frozen=True)
class SeenLoss:
    """What a loss outside of the module took in a step to which `left_bytes` were left for it."""

    left_bytes: int
    most_bytes: int  # at once, before the module's backward
    given_bytes: int  # of that the gradients that the backward begins with: the module counts them
    kept_bytes: int  # when it begins, beside them

    def __post_init__(self) -> None:
        sizes = (self.left_bytes - 1, self.most_bytes, self.given_bytes, self.kept_bytes)
        if not all_finite(sizes):
            raise ValueError(f"sizes of no loss: {self}")

    @property
    def taken_bytes(self) -> int:
        """What to leave to it all the time."""
        return max(0, self.most_bytes - self.given_bytes)

    def at(self, left_bytes: int) -> SeenLoss:
        """Return what it takes of another call, in proportion to what would be left to it."""
        each = (self.most_bytes, self.given_bytes, self.kept_bytes)
        return SeenLoss(left_bytes, *(-(-n * left_bytes // self.left_bytes) for n in each))


@dataclass(frozen=True)
class PlanFile:
    """Plans of one model, or its plan of blocks, and the versions they were made with.

    Example:
        >>> rk.save_plan("gpt2.plan.json")
        >>> PlanFile.load("gpt2.plan.json").plans[0].plan.overhead
    """

    model: str
    made_with: Mapping[str, str]
    plans: tuple[SavedPlan, ...]
    blocks: SavedBlocks | None = None
    loss: SeenLoss | None = None  # if memory was given

    def __post_init__(self) -> None:
        if not self.plans and self.blocks is None:
            raise ValueError("there is no plan in it")

    def __repr__(self) -> str:
        return f"<plan file of {self.model}: {len(self.plans)} plans>"

    def to_json(self) -> str:
        """Return the file's text; `from_json` gives an equal object back."""
        content = row_of(self)
        head = {"rockmate_plans": FORMAT, "checksum": checksum(content)}
        return json.dumps({**head, "content": content}, indent=None, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PlanFile:
        """Read what `to_json` wrote.

        Raises:
            PlanFileError: the text is no such file.
        """
        data = parse(text)
        if not isinstance(data, dict) or "rockmate_plans" not in data:
            raise PlanFileError("expected a file that rk.save_plan wrote, found something else")
        version = data["rockmate_plans"]
        if type(version) is not int or version != FORMAT:
            raise PlanFileError(
                f"expected plans in format {FORMAT}, found format {str(version)[:40]}; save them "
                "again with this version of rockmate"
            )
        if data.keys() != {"rockmate_plans", "checksum", "content"}:
            raise PlanFileError("expected a checksum and a content beside the format")
        try:
            if data["checksum"] != checksum(data["content"]):
                raise PlanFileError(
                    "the plan file was cut or changed since it was written: its checksum is not "
                    "that of its content. Save the plan again"
                )
            return from_row(cls, data["content"], "content")
        except RecursionError:
            raise PlanFileError("the file is nested too deeply for a plan") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file atomically: all of it, or nothing.

        Raises:
            PlanFileError: it cannot be written.
        """
        save_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str], *, by_blocks: bool = False) -> PlanFile:
        """Read a file of plans of a module, or with `by_blocks` of a plan of blocks.

        Raises:
            PlanFileError: it cannot be read, or is no such file.
        """
        text = load_text(path)
        try:
            found = cls.from_json(text)
        except PlanFileError as error:
            raise PlanFileError(f"{str(path)!r}: {error}") from None
        if (found.blocks is not None) != by_blocks:
            taker = "Rockmate(..., plan=...)" if by_blocks else "apply_to_blocks(..., plan=...)"
            kind = "a plan of a module" if by_blocks else "a plan block by block"
            raise PlanFileError(f"{str(path)!r} holds {kind}, which {taker} takes")
        return found


def _check_plan(problem: Problem, plan: Plan) -> None:
    """Check a plan's figures by simulating its steps.

    Raises:
        PlanFileError: the steps are out of order or over their budget, or the figures differ.
    """
    try:
        plan.check(problem)
    except InvalidPlanError as error:
        raise PlanFileError(f"a plan that does not hold: {error}") from None
    timeline = simulate(problem, plan.steps, plan.moves)
    claims = (plan.peak_bytes, plan.overhead_ms, plan.base_time_ms)
    found = (timeline.peak_bytes, timeline.overhead_ms, problem.base_time_ms)
    if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(claims, found, strict=True)):
        raise PlanFileError(
            f"a plan that claims peak, overhead and base time {claims}, and has {found}"
        )
    if plan.bound_ms is not None and not 0 <= plan.bound_ms <= plan.time_ms * (1 + 1e-9):
        raise PlanFileError(f"a bound of {plan.bound_ms} ms for a step of {plan.time_ms} ms")


def checksum(content: Any) -> str:
    """Return the checksum of a content, which detects truncation and edits."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; an older one stays until the new one is complete.

    A process that dies in between leaves at most a file of another name, ending in `.part`. If the
    path is a link, its target is written.

    Raises:
        OSError: it cannot be written, or the path is not a regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "something that is no file lies there", str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    written = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.chmod(_usual_mode())
        written.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that a user has named; an older one stays until the new one is complete.

    Raises:
        PlanFileError: it cannot be written.
    """
    try:
        write_whole(Path(path), text.encode())
    except (OSError, ValueError) as error:  # ValueError: the path is invalid
        raise PlanFileError(
            f"cannot write the plan file {os.fspath(path)!r}: {error}. Nothing was changed there. "
            "Name a file in a folder that exists and that this process may write to."
        ) from None


def load_text(path: str | os.PathLike[str]) -> str:
    """Read a file that a user has named.

    Raises:
        PlanFileError: it cannot be read, or is no text file.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device might never end
            raise OSError(errno.EINVAL, "something that is no file lies there")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot read the plan file {os.fspath(path)!r}: {error}") from None


def _usual_mode() -> int:
    """Return the mode of files that this process makes; temporary ones are private."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
