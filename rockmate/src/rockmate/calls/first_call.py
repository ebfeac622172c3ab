"""Effects of a module's first plain call, and messages that are logged once for a module."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import nn

from rkgb.safeguards import Setting
from rkgb.torch_api import compiled_modules

_log = logging.getLogger("rockmate")
_MOST_NAMED = 3  # compiled modules, in the log
# Logged if torch.compile is taken off.
INSTEAD = "its operations are planned one by one; compile=True compiles what is planned"


class FirstCall:
    """Attributes that the plain forward of `model` sets at its first call, which is recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._settings: list[Setting] = []
        self._told: set[str] = set()

    def note(self, settings: Iterable[Setting]) -> None:
        """Set these now, and at every call at which they are due."""
        known = {setting.key for setting in self._settings}
        for found in settings:
            setting = found.on(self.model)
            if setting.key not in known:
                self._settings.append(setting)
        self.sets()

    def sets(self) -> list[Setting]:
        """Set what the plain forward would set at this call; return what was due."""
        due = [setting for setting in self._settings if setting.is_due]
        for setting in due:
            setting.apply()
        return due

    def take_back(self, due: Sequence[Setting]) -> None:
        """Undo and forget settings: they were found under other circumstances than this call's."""
        self.undo(due)
        self._settings = [setting for setting in self._settings if setting not in due]

    def undo(self, settings: Sequence[Setting] | None = None) -> None:
        """Undo these settings, or all; the next call sets them again."""
        for setting in reversed(self._settings if settings is None else settings):
            setting.undo()

    def tell_what_is_taken_off(self) -> None:
        """Log once that checkpoints or torch.compile inside the model are taken off."""
        name = type(self.model).__name__
        wanted = (getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        if "checkpoints" not in self._told and any(value is True for value in wanted):
            self._told.add("checkpoints")
            _log.info(
                "gradient checkpointing inside %s is taken off: the plan decides what is "
                "recomputed",
                name,
            )
        paths = compiled_modules(self.model)
        if "compiled" not in self._told and paths:
            self._told.add("compiled")
            inside = ", ".join(f"'{path or '(root)'}'" for path in paths[:_MOST_NAMED])
            more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
            _log.info("torch.compile of %s%s in %s is taken off: %s", inside, more, name, INSTEAD)
