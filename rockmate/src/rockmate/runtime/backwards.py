"""The executables of one forward: one for each way in which gradients may arrive."""

from __future__ import annotations

from collections.abc import Callable

from rkgb.graphs import BackwardKind
from rockmate.runtime.executable import Executable

# Makes the executable for other gradients, from what the step was called with.
Variant = Callable[[BackwardKind], Executable]


class Backwards:
    """What was made for backwards of each kind, and which is expected next."""

    def __init__(self, planned: Executable) -> None:
        self.planned = self.expected = planned
        self.latest = planned  # whose backward ran last
        self.variants = {planned.kind: planned}

    def for_backward(self, kind: BackwardKind, variant: Variant) -> Executable:
        """Return the executable for such a backward, and expect it from now on.

        Unless its forward would not keep what other backwards need: the outputs that a loss is
        made of may alternate.
        """
        if kind not in self.variants:
            made = variant(kind)
            if made.numbers is None and self.planned.numbers is not None:
                return made  # for the numbers of this call alone
            self.variants[kind] = made
        found = self.variants[kind]
        runs_again = found.keeps_by_backward or found.is_apart
        keeps_all = runs_again or not found.missing_for(self.planned)
        self.expected = found if keeps_all else self.planned
        return found
