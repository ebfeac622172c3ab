"""The executables of one forward: one for each way in which gradients may arrive."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import nn

from rkgb.graphs import BackwardKind
from rockmate.runtime.executable import Executable

# Makes the executable for other gradients, from what the step was called with.
Variant = Callable[[BackwardKind], Executable]


def compares_contents(step: int) -> bool:
    """Whether contents are compared in a step, counted from 1: the 1st, 2nd, 4th, 8th, ..."""
    return not step & (step - 1)


class Backwards:
    """What was made for backwards of each kind, and which is expected next."""

    def __init__(self, planned: Executable, room_bytes: int = 0) -> None:
        self.planned = self.expected = planned
        self.latest = planned  # whose backward ran last
        self.variants = {planned.kind: planned}
        # Of the budget, for outputs beside the losses that are still held in the backward.
        self.room_bytes, self.has_warned = room_bytes, False
        # By what has begun a backward of a step with hidden states: of which kind it turned out.
        self.came: dict[Hashable, BackwardKind] = {}
        self._looked = dict[int, int]()  # steps, by the module that they are of

    def is_due(self, model: nn.Module) -> bool:
        """Whether contents are compared in this step of a module."""
        count = self._looked[id(model)] = self._looked.get(id(model), 0) + 1
        return compares_contents(count)

    def look_at(self, model: nn.Module) -> None:
        """Compare contents in the next step of this module, whichever it is."""
        self._looked[id(model)] = 0

    def for_backward(self, kind: BackwardKind, variant: Variant) -> Executable:
        """Return the executable for such a backward, and expect it from now on.

        Unless its forward would not keep what other backwards need: the outputs that a loss is
        made of may alternate.
        """
        if kind not in self.variants:
            made = variant(kind)
            if made.numbers is None and self.planned.numbers is not None:
                return made  # for the numbers of this call alone
            self.variants[kind] = self.variants[made.kind] = made
        found = self.variants[kind]
        runs_again = found.keeps_by_backward or found.is_apart
        keeps_all = runs_again or kind.is_split or not found.missing_for(self.planned)
        self.expected = found if keeps_all else self.planned
        return found
