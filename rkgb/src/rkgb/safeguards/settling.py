"""Plain values that a forward sets only at its first call.

An example is `if config.problem_type is None: config.problem_type = "regression"`. Calls before and
after the assignment compute the same. So the step is recorded with the values set, and a planned
step sets them first, as the plain forward would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rkgb.elements.op import Op
from rkgb.errors import SideEffectError, in_module
from rkgb.graphs.differences import run_alike
from rkgb.guards.sources import Sources
from rkgb.outside.held import is_same

ABSENT = object()
_PLAIN = (bool, int, float, str, type(None), torch.device, torch.dtype)


@dataclass(frozen=True, eq=False)
class Setting:
    """A plain value that an attribute of an object, or a key of a dict, gets at a first call."""

    owner: Any  # the user's object
    name: str
    before: Any
    after: Any
    path: str  # of the submodule that leads to the owner

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the place."""
        return id(self.owner), self.name

    @property
    def is_due(self) -> bool:
        """Whether a call would set it now."""
        held = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        now = held.get(self.name, ABSENT)
        return now is self.before or (type(now) is type(self.before) and now == self.before)

    def on(self, model: nn.Module) -> Setting:
        """Return the same setting for another module."""
        is_part = isinstance(self.owner, nn.Module)
        return replace(self, owner=model.get_submodule(self.path)) if is_part else self

    def apply(self) -> None:
        """Set it."""
        self._set(self.after)

    def undo(self) -> None:
        """Restore the old value."""
        self._set(self.before)

    def _set(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            if value is ABSENT:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif value is not ABSENT:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class SettlesError(Exception):
    """A forward has set plain values; `ops` are its operations, and `sources` what it has read."""

    def __init__(self, settings: Sequence[Setting], ops: Sequence[Op], sources: Sources) -> None:
        super().__init__(settings, ops, sources)
        self.settings, self.ops, self.sources = settings, ops, sources


class Settled:
    """The settings that are applied to the user's model while a step is recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.settings: list[Setting] = []
        self._ops: tuple[Op, ...] = ()
        self._sources: Sources | None = None  # what the values were made of

    def take(self, found: SettlesError) -> None:
        """Apply the settings of a forward.

        Raises:
            SideEffectError: the forward sets a place again.
        """
        known = {setting.key for setting in self.settings}
        for setting in found.settings:
            if setting.key in known:
                self._refuse(setting, "sets it anew at every call")
        if not self.settings:
            self._ops = tuple(found.ops)
        before = self._sources
        self._sources = found.sources if before is None else before.joined(found.sources)
        for setting in found.settings:
            setting.apply()
            self.settings.append(setting)

    def refuse_others(self, ops: Sequence[Op]) -> None:
        """Refuse a forward whose operations differ once everything is set.

        Raises:
            SideEffectError: they differ.
        """
        if self.settings and not run_alike(self._ops, ops):
            self._refuse(self.settings[0], "does something else at its first call")

    def sources(self, of_others: Sources) -> Sources:
        """Return what the step reads once everything is set, and what the values were made of."""
        found = of_others if self._sources is None else of_others.joined(self._sources)
        found.settings = tuple(self.settings)
        return found

    def undo(self) -> None:
        """Undo all settings."""
        for setting in reversed(self.settings):
            setting.undo()

    def _refuse(self, setting: Setting, what: str) -> None:
        name = type(setting.owner).__name__
        raise SideEffectError.to_capture(
            type(self.model).__name__,
            f"pass '{setting.name}' ({name}) as an argument, or set it outside of forward",
            f"its forward sets it and {what}, which a recording would not do again",
            in_module(setting.path),
            module_path=setting.path,
        )


def settings_of(
    owner: Any, own: Any, before: Mapping[Any, Any], names: Collection[str], path: str
) -> list[Setting] | None:
    """Return the names whose plain values have changed in a copy; None if other values changed.

    `owner` is a copy of `own`, the user's object.
    """
    held = owner if isinstance(owner, dict) else vars(owner)
    found = []
    for name in names:
        was, now = before.get(name, ABSENT), held.get(name, ABSENT)
        if is_same(now, was):
            continue
        if not isinstance(name, str) or not _is_plain(now) or not (was is ABSENT or _is_plain(was)):
            return None
        found.append(Setting(own, name, was, now, path))
    return found


def all_settings(parts: Iterable[list[Setting] | None]) -> list[Setting]:
    """Return the settings of all parts, or [] if a part is None."""
    found: list[Setting] = []
    for part in parts:
        if part is None:
            return []
        found += part
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)
