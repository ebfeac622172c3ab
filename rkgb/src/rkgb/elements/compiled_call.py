"""Half of a compiled piece, as the target of an operation like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

# Takes a list of tensors, which it empties.
Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


class CompiledCall:
    """The forward or the backward of a class of pieces, as the target of an operation.

    The arguments in the places `frees` are nobody else's: each is freed inside, after its last use.
    """

    def __init__(
        self,
        run: Boxed,
        name: str,
        digest: str,
        side: str,
        flops: int,
        frees: frozenset[int] = frozenset(),
    ) -> None:
        self.run, self.digest, self.side, self.flops = run, digest, side, flops
        self.frees = frees
        self.__name__ = name

    def __repr__(self) -> str:  # equal for equal pieces, in every process: costs are kept under it
        freed = f" frees {sorted(self.frees)}" if self.frees else ""
        return f"compiled {self.digest} {self.side}{freed}"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.run(list(tensors))

    def freeing(self, places: frozenset[int]) -> CompiledCall:
        """Return the same call with arguments that it frees."""
        return CompiledCall(self.run, self.__name__, self.digest, self.side, self.flops, places)
