"""The executables of one forward, one for each kind of backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import nn

from rkgb.elements import Assign
from rkgb.graphs import BackwardKind
from rockmate.guards.read_in_backward import PythonOfBackward
from rockmate.runtime.executable import Executable

# Makes the executable for another kind of backward of a step.
Variant = Callable[[BackwardKind], Executable]


def compares_contents(step: int) -> bool:
    """Return whether contents are compared in a step, counted from 1: the 1st, 2nd, 4th, 8th, …"""
    return not step & (step - 1)


class Backwards:
    """The executables for each kind of backward, and the kind expected next."""

    def __init__(self, planned: Executable, room_bytes: int = 0) -> None:
        self.planned = self.expected = planned
        self.latest = planned  # the one whose backward ran last
        self.variants = {planned.kind: planned}
        # Headroom in the budget for outputs beside the losses that are still held in the backward.
        self.room_bytes, self.has_warned = room_bytes, False
        # For steps with hidden states: the kind of backward that each beginning has led to.
        self.came: dict[Hashable, BackwardKind] = {}
        self._looked = dict[int, int]()  # number of steps by module
        self._python: PythonOfBackward | None = None

    def is_due(self, model: nn.Module) -> bool:
        """Return whether contents are compared in this step of a module."""
        count = self._looked[id(model)] = self._looked.get(id(model), 0) + 1
        return compares_contents(count)

    def look_at(self, model: nn.Module) -> None:
        """Let the next step of this module compare contents."""
        self._looked[id(model)] = 0

    def python_of(self, executable: Executable, model: nn.Module | None) -> PythonOfBackward | None:
        """Return what Python of a backward reads now; None if it reads nothing."""
        read = executable.basic.sources.of_backward
        if read is None:
            return None
        known = self._python
        if known is None or not known.is_of(model) or not known.holds():
            effects = executable.basic.effects
            set_by_step = {(e.path, e.name) for e in effects if isinstance(e, Assign)}
            self._python = PythonOfBackward(read, model, set_by_step)
        return self._python

    def for_backward(self, kind: BackwardKind, variant: Variant) -> Executable:
        """Return the executable for a kind of backward, and expect that kind from now on.

        It is not expected if its forward would not save what other backwards need: a training loop
        may alternate between losses.
        """
        if kind not in self.variants:
            made = variant(kind)
            if made.numbers is None and self.planned.numbers is not None:
                return made  # only for the numbers of this call
            self.variants[kind] = self.variants[made.kind] = made
        found = self.variants[kind]
        runs_again = found.keeps_by_backward or found.is_apart
        keeps_all = runs_again or kind.is_split or not found.missing_for(self.planned)
        self.expected = found if keeps_all else self.planned
        return found
