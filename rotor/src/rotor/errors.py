"""Errors of rotor. Each says what was asked, what was found, what to do, and has the numbers."""

from __future__ import annotations

from typing import Any


def format_bytes(count: int) -> str:
    """Return `count` bytes for a person, exact to the byte: `1.20 GiB (1288490188 bytes)`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit} ({count} bytes)"
    return f"{count} bytes"


class RotorError(Exception):
    """Base class of every error that rotor raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying and unpickling set what an error carries, and do not call its `__init__` again.
        state = {**vars(self), "msg": self.msg} if isinstance(self, ImportError) else vars(self)
        return Exception.__new__, (type(self), *self.args), state


class InvalidChainError(RotorError, ValueError):
    """A chain whose numbers cannot describe a computation."""


class InfeasibleBudgetError(RotorError, ValueError):
    """No schedule fits in the budget; `minimum_bytes` is the smallest budget that works."""

    def __init__(
        self, budget_bytes: int, minimum_bytes: int, stages: int, detail: str = ""
    ) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.stages = stages
        self.detail = detail
        super().__init__(
            f"no schedule of {stages} stages fits in {format_bytes(budget_bytes)}: the smallest "
            f"feasible budget is {format_bytes(minimum_bytes)}.{' ' + detail if detail else ''} "
            f"Raise the budget to at least {minimum_bytes} bytes or make the sample smaller."
        )


class InvalidScheduleError(RotorError, ValueError):
    """A schedule that breaks a rule; `position` is the index of the op that breaks it."""

    def __init__(self, message: str, position: int | None = None) -> None:
        self.position = position
        super().__init__(message)


class TableTooLargeError(RotorError, MemoryError):
    """The dynamic program's table would not fit; nothing was allocated."""

    def __init__(self, needed_bytes: int, limit_bytes: int, stages: int, slots: int) -> None:
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.stages = stages
        self.slots = slots
        super().__init__(
            f"a table for {stages} stages and {slots} slots takes {format_bytes(needed_bytes)}, "
            f"and the limit is {format_bytes(limit_bytes)}. Use fewer slots, merge stages, or "
            f"raise max_table_bytes."
        )


class NotSequentialError(RotorError, TypeError):
    """The module is not an `nn.Sequential`, so its stages cannot be told apart."""


class StageError(RotorError, RuntimeError):
    """A stage cannot be checkpointed; `stage` is its path in the module."""

    def __init__(self, message: str, stage: str) -> None:
        self.stage = stage
        super().__init__(message)


class InPlaceInputError(StageError):
    """A stage overwrites an input that others need and cannot be joined to the stage before it."""


class NotMeasuredError(RotorError, RuntimeError):
    """A call needs a measurement or a schedule, and there is none."""


class MemoryLimitError(RotorError, ValueError):
    """The memory limit cannot be read, or is missing where the device reports no free memory."""


class MemoryLimitFormatError(MemoryLimitError):
    """A memory limit that cannot be read: `limit` is the given value, `problem` says why."""

    def __init__(self, limit: object, problem: str) -> None:
        self.limit = limit
        self.problem = problem
        super().__init__(
            f"mem_limit {limit!r} {problem}. Give an int (bytes), a float in (0, 1] (fraction of "
            f"what a step takes without recomputation), or text such as '2GiB', '800 MB' or '40%'."
        )


class BackwardError(RotorError, RuntimeError):
    """The backward of a checkpointed step cannot run: it has run, or its data has changed."""
