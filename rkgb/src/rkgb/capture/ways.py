"""The options of a recording, and those of one attempt, which follow from earlier attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.elements.effect import Assign, ObserverHook
from rkgb.graphs.basic import BasicGraph
from rkgb.recording.numbers import NumberTrace
from rkgb.recording.recorder import Recorder
from rkgb.recording.sizes import BoundedRecorder, SizeRecorder

Names = frozenset[tuple[str, str]]  # of attributes, with the paths of their modules


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a recording beside its module and its sample; `record` says what it is."""

    guards: bool = True
    known: BasicGraph | None = None
    held_bytes: dict[str, int] | None = None
    numbers: NumberTrace | None = None
    is_metered: bool = False
    runs_pieces: bool = True
    bound: tuple[Sequence[int], int] | None = None

    @property
    def hidden(self) -> Names:
        """The attributes that a known recording sets, and whose old values must not be read."""
        if self.known is None or self.runs_pieces:
            return frozenset()
        return frozenset((e.path, e.name) for e in self.known.effects if isinstance(e, Assign))

    def recorder(self, *given: Any) -> Recorder:
        """Return what writes operations down."""
        if self.held_bytes is not None:
            return SizeRecorder(self.held_bytes, self.known, *given, guards=self.guards)
        if self.bound is not None:
            return BoundedRecorder(*self.bound, *given, guards=self.guards)
        return Recorder(*given, guards=self.guards)


@dataclass(frozen=True, slots=True)
class Way:
    """The options of one attempt."""

    opaque: tuple[str, ...] = ()  # submodules
    functions: tuple[type[torch.autograd.Function], ...] = ()  # of autograd, as opaque calls
    hidden: Names = frozenset()  # attributes that it sets
    settling: Names = frozenset()  # that it looks at first, and sets once
    written: frozenset[str] = frozenset()  # arguments that it writes to
    keeps_content: bool = False  # of what only a backward reads
    tried: Any = None  # opaque calls that another attempt has tried
    read_hooks: frozenset[ObserverHook] = frozenset()  # that set what the forward reads
    remembers: bool = False  # functions have results that an attempt before has computed
    repeats: bool = True  # equal operations may stand for each other
