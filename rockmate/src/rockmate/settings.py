"""The user's settings and budget, which are checked before any work is done.

`Settings` is the only definition of the keywords of `Rockmate` and related functions (see
`arguments`). A budget is bytes, text with a unit, or a fraction of eager's activation peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Literal

from rockmate.errors import ArgumentsError, BudgetFormatError, UnknownChoiceError
from rockmate.planners.effort import effort_of
from rockmate.planners.portfolio import check_planner
from rockmate.problems.link import Link
from rockmate.solvers import check_backend

Budget = int | float | str
COSTS = ("measured", "flops")
SelfTest = bool | Literal["deterministic"]
DEVICE = "device"  # as memory: what it has, and nobody else holds
HOST, DISK = "host", "disk:"  # as offload; a folder follows the second
SELF_TESTS = (True, False, "deterministic")
SPLITS = (False, True, "exact")

_FORMS = "an int (bytes), a float in (0, 1] (fraction of eager's activation peak), or text such as "
_FORMS += "'2GiB', '800 MB' or '40%'"
_MEMORY_FORMS = "Give bytes, '24GB', or 'device' for what it has."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to plan: the keywords of `Rockmate`, `apply`, `apply_to_blocks`, `estimate` and others.

    They have the same meaning and defaults everywhere. Settings that you use often can be kept in
    one object and passed as keywords.

    Args:
        effort: how long to search: "fast", "balanced", "best", or seconds of processor time.
        cost: what to minimise: "measured" time, or deterministic "flops".
        self_test: run one step against eager PyTorch after planning and compare bits and bytes.
            If two eager steps differ, gradients may differ by that noise; "deterministic" also
            compares bits once with torch's deterministic algorithms.
        reserve: bytes of the budget for a loss that is computed outside the module.
        max_plans: number of plans to keep; a new plan replaces the least recently used one.
        planner: "auto", or the name of one strategy, for comparisons.
        backend: solver of the block problems: "cp-sat", "cbc", "highs" or "gurobi".
        progress: show a progress bar while planning. The default is True in a terminal or notebook.
        opaque: paths of submodules to run as opaque calls, as `torch.utils.checkpoint` would,
            instead of recording them.
        strict: refuse a module with a part that cannot be recorded. Otherwise the smallest
            submodule around that part becomes an opaque call; `plan.opaque` lists them.
        compile: compile runs of neighbouring operations with inductor. Results then have the same
            bits under every budget, and equal eager's up to rounding. `plan.compiled` shows what is
            compiled, and the difference that the self-test found. A compiled piece recomputes norms
            and the like in its backward, or saves them if that makes a step faster. Needs a C++
            compiler (CPU) or Triton (GPU), and some seconds for each kind of piece.
        split: run the largest parts of a step in pieces of rows, if the budget is too small for
            them as a whole, or if that is faster than recomputation. Examples are the head of a
            language model with its loss, and blocks of linear layers. `print(plan)` shows what is
            cut, in how many pieces. Gradients of weights are then sums over pieces, which have the
            same bits under every budget with the same pieces, and equal eager's up to rounding.
            With "exact", such sums are computed as a whole, which takes more memory, and only
            pieces are used that have eager's bits in a test on this machine.
        offload: where storages may be while nothing reads them: "host" (on a GPU: memory of the
            host), or "disk:/path" (files in that folder). Rates are measured while planning, and
            each storage is then kept, recomputed or moved, whichever makes the step fastest within
            the budget. Bits do not change. A slow link takes time, never more memory.
        host_budget: with `offload`, the most bytes there, as a number or text.
        plan: path of a file from `save_plan`. Its plan is used without search and measurement; a
            call, device or version that differs from the file's is refused.
        cache: a folder that keeps plans between two starts; False for none. The default is
            `ROCKMATE_CACHE` (a path, or "off"), or else the user's cache directory.
        share: with torch.distributed, let rank 0 plan for all ranks with the same step. False lets
            each rank plan separately, without waiting for others.
        check_every: with n above 0, each n-th call is recorded again before it runs, and compared
            with its plan (`Rockmate.check`). Its backward also compares the contents of tensors
            from which it recomputes. The calls after a recorded one are always compared.

    Example:
        >>> careful = rockmate.Settings(effort="best", self_test="deterministic")
        >>> rk = Rockmate(model, x, "2GiB", **careful)

    Raises:
        UnknownChoiceError: a value is unknown; the error names the choices.
        SolverUnavailableError: the backend is not installed.
    """

    effort: str | float = "fast"
    cost: Literal["measured", "flops"] = "measured"
    self_test: SelfTest = True
    reserve: int = 0
    max_plans: int = 16
    planner: str = "auto"
    backend: str = "cp-sat"
    progress: bool | None = None
    opaque: Sequence[str] = ()
    strict: bool = False
    compile: bool = False
    split: bool | Literal["exact"] = False
    offload: str | None = None
    host_budget: int | str | None = None
    plan: str | PathLike[str] | None = None
    cache: bool | str | PathLike[str] | None = None
    share: bool = True
    check_every: int = 0

    def __post_init__(self) -> None:
        self._check_cost()
        if self.self_test not in SELF_TESTS:
            raise UnknownChoiceError("self_test", str(self.self_test), tuple(map(str, SELF_TESTS)))
        if not isinstance(self.compile, bool):
            raise UnknownChoiceError("compile", self.compile, ("True", "False"))
        if self.split not in SPLITS:
            raise UnknownChoiceError("split", str(self.split), tuple(map(str, SPLITS)))
        every = self.check_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise UnknownChoiceError("check_every", every, ("0", "a number of calls"))
        reserve = self.reserve
        if isinstance(reserve, bool) or not isinstance(reserve, int) or reserve < 0:
            raise UnknownChoiceError("reserve", reserve, ("0",), "a number of bytes")
        effort_of(self.effort)
        check_planner(self.planner)
        check_backend(self.backend)
        if self.compile and self.plan is not None:
            raise ArgumentsError(
                "plan= and compile=True exclude each other: a file knows no compiled code"
            )
        self._check_offload()
        object.__setattr__(self, "opaque", tuple(self.opaque))
        for name in ("plan", "cache"):
            path = getattr(self, name)
            if isinstance(path, PathLike):
                object.__setattr__(self, name, fspath(path))

    @property
    def stands_alone(self) -> bool:
        """Whether a plan is for the sizes of its own call only."""
        return self.compile or self.offload is not None

    @property
    def fixes_numbers(self) -> bool:
        """Whether a plan is for the numbers of its own call: pieces of rows hold them, too."""
        return self.stands_alone or bool(self.split)

    @property
    def host_bytes(self) -> int | None:
        """The most bytes that may be moved, or None without a limit."""
        return None if self.host_budget is None else parse_budget(self.host_budget)[0]

    def _check_offload(self) -> None:
        where = self.offload
        if where is None:
            if self.host_budget is not None:
                raise ArgumentsError(
                    f"host_budget= limits what offload= moves: give offload='{HOST}' or "
                    f"'{DISK}/path'"
                )
            return
        is_folder = isinstance(where, str) and where.startswith(DISK) and where != DISK
        if where != HOST and not is_folder:
            raise UnknownChoiceError("offload", str(where), (HOST, f"{DISK}/path"))
        if self.host_budget is not None and parse_budget(self.host_budget)[0] is None:
            raise BudgetFormatError(
                f"host_budget {self.host_budget!r} is a fraction. Give bytes, or '8GB'."
            )
        if self.compile:
            raise ArgumentsError(
                f"offload={where!r} and compile=True exclude each other: no moves are "
                "planned beside compiled pieces so far. Leave one of them out"
            )
        if self.split:
            raise ArgumentsError(
                f"offload={where!r} and split={self.split!r} exclude each other: no moves are "
                "planned beside pieces of rows so far. Leave one of them out: pieces need less "
                "memory at one moment, moves less from the forward to the backward"
            )

    def _check_cost(self) -> None:
        if self.cost not in COSTS:
            raise UnknownChoiceError("cost", self.cost, COSTS)

    def settings(self, **instead: Any) -> Settings:
        """Return only the settings, without other arguments of a call."""
        own = {f.name: getattr(self, f.name) for f in fields(Settings)}
        return Settings(**{**own, **instead})

    def keys(self) -> Set[str]:
        """Return the names of settings other than the defaults, for `**settings`."""
        names = (f.name for f in fields(Settings) if getattr(self, f.name) != f.default)
        return dict.fromkeys(names).keys()

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def refuse(self, function: str, whys: Mapping[str, str]) -> None:
        """Refuse settings that a function does not support; `whys` has the reasons.

        Raises:
            ArgumentsError: one of them is not the default.
        """
        for name in self.keys() & whys.keys():
            raise ArgumentsError(f"{function} takes no {name}={self[name]!r}: {whys[name]}.")


@dataclass(frozen=True)
class Terms(Settings):
    """A budget, with settings."""

    budget: Budget
    most_kept_bytes: int | None = None  # of a module among others: from its forward to its backward
    whole_step: Any = None  # a `WholeStep`, where memory was given: each call's budget follows
    coming: Any = None  # a `Coming`, if the budget includes gradients that the backward allocates
    link: Link | None = None  # with `offload`, its rates, if they are known


def parse_memory(memory: Budget) -> int | None:
    """Return the bytes of `memory`, or None for "device".

    Raises:
        BudgetFormatError: it cannot be read, or is a fraction.
    """
    if memory == DEVICE:
        return None
    try:
        found, _ = parse_budget(memory)
    except BudgetFormatError as error:
        text = str(error).replace("budget", "memory", 1).partition(" Give ")[0]
        raise BudgetFormatError(f"{text} {_MEMORY_FORMS}") from None
    if found is None:
        raise BudgetFormatError(f"memory {memory!r} is a fraction. {_MEMORY_FORMS}")
    return found


def parse_budget(budget: Budget) -> tuple[int | None, float | None]:
    """Return (bytes, None) or (None, fraction of eager's activation peak).

    Bytes round down. Units follow the standard: G and GB are 10^9 bytes, Gi and GiB are 2^30. Text
    without a unit is a fraction ("0.6"), or bytes if it is a large number ("1_000_000").

    Raises:
        BudgetFormatError: the value is not positive, a float above 1, or unreadable.
    """
    from rotor import MemoryLimitFormatError, parse_limit  # only now, as it takes its core along

    try:
        found = parse_limit(budget)
    except MemoryLimitFormatError as error:
        if isinstance(budget, (int, float, str)):
            said = f"budget {budget!r} {error.problem}."
        else:
            kind = type(budget).__name__
            said = f"the budget is a {kind}; it comes third, behind model and sample."
        raise BudgetFormatError(f"{said} Give {_FORMS}.") from None
    return (None, found) if isinstance(found, float) else (found, None)
