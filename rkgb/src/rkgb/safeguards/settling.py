"""What a forward sets at its first call, and finds set from then on.

`if config.problem_type is None: config.problem_type = "regression"`: a call before it and a call
after it compute the same. A step is recorded as it is from then on; whoever runs it sets first what
the plain forward would set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rkgb.elements.op import Op
from rkgb.errors import SideEffectError
from rkgb.graphs.differences import run_alike

ABSENT = object()
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class Setting:
    """A plain value that an attribute of an object, or a place of a dict, gets at a first call."""

    owner: Any  # the user's own
    name: str
    before: Any
    after: Any
    path: str  # of the submodule that leads to the owner

    @property
    def key(self) -> tuple[int, str]:
        """What tells the place from others."""
        return id(self.owner), self.name

    @property
    def is_due(self) -> bool:
        """Whether a call would set it now."""
        held = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        now = held.get(self.name, ABSENT)
        return now is self.before or (type(now) is type(self.before) and now == self.before)

    def on(self, model: nn.Module) -> Setting:
        """Return the same for a module, whose stand-in was recorded."""
        is_part = isinstance(self.owner, nn.Module)
        return replace(self, owner=model.get_submodule(self.path)) if is_part else self

    def apply(self) -> None:
        """Set it."""
        self._set(self.after)

    def undo(self) -> None:
        """Let the place hold what it held."""
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
    """A forward has set plain values; `ops` is what it ran until its end."""

    def __init__(self, settings: Sequence[Setting], ops: Sequence[Op]) -> None:
        super().__init__(settings, ops)
        self.settings, self.ops = settings, ops


class Settled:
    """What the user's model has been made to hold while a step of it is recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.settings: list[Setting] = []
        self._ops: tuple[Op, ...] = ()

    def take(self, found: SettlesError) -> None:
        """Set what a forward has set.

        Raises:
            SideEffectError: it has set it before.
        """
        known = {setting.key for setting in self.settings}
        for setting in found.settings:
            if setting.key in known:
                self._refuse(setting, "sets it anew at every call")
        if not self.settings:
            self._ops = tuple(found.ops)
        for setting in found.settings:
            setting.apply()
            self.settings.append(setting)

    def refuse_others(self, ops: Sequence[Op]) -> None:
        """Refuse a forward that runs other operations once everything is set.

        Raises:
            SideEffectError: it does.
        """
        if self.settings and not run_alike(self._ops, ops):
            self._refuse(self.settings[0], "does something else at its first call")

    def undo(self) -> None:
        """Let the model hold what it held."""
        for setting in reversed(self.settings):
            setting.undo()

    def _refuse(self, setting: Setting, what: str) -> None:
        name = type(setting.owner).__name__
        error = SideEffectError(
            f"cannot capture {type(self.model).__name__}: in module '{setting.path or '(root)'}' "
            f"its forward sets '{setting.name}' ({name}) and {what}, which a captured graph would "
            "not do again. Pass what it gives as an argument, or do it outside of forward."
        )
        error.module_path = setting.path
        raise error


def settings_of(
    owner: Any, own: Any, before: Mapping[Any, Any], names: Collection[str], path: str
) -> list[Setting] | None:
    """Return which of these names hold other plain values in a copy than before; None if others.

    `own` is the user's object that `owner` is a copy of.
    """
    held = owner if isinstance(owner, dict) else vars(owner)
    found = []
    for name in names:
        was, now = before.get(name, ABSENT), held.get(name, ABSENT)
        if now is was:
            continue
        if not isinstance(name, str) or not _is_plain(now) or not (was is ABSENT or _is_plain(was)):
            return None
        found.append(Setting(own, name, was, now, path))
    return found


def all_settings(parts: Iterable[list[Setting] | None]) -> list[Setting]:
    """Return the settings of all parts; none where one of them is no setting."""
    found: list[Setting] = []
    for part in parts:
        if part is None:
            return []
        found += part
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)
