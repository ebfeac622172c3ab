"""The forward or the backward of a compiled piece, as the target of an ordinary operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rkgb.elements.op import Op
from rkgb.elements.target import Boxed, Target


class CompiledCall(Target):
    """The forward or the backward of a class of pieces, as the target of an operation.

    The arguments at the positions `frees` are donated: the call frees each after its last use.
    """

    is_half = True
    run: Boxed

    def __init__(
        self,
        run: Boxed,
        name: str,
        digest: str,
        side: str,
        flops_of_one: int,
        frees: frozenset[int] = frozenset(),
    ) -> None:
        self.run, self.digest, self.side, self.flops_of_one = run, digest, side, flops_of_one
        self.frees = frees
        self.__name__ = name

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        freed = f" frees {sorted(self.frees)}" if self.frees else ""
        return f"compiled {self.digest} {self.side}{freed}"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.run(list(tensors))

    def flops(self, count: Callable[[Op], int]) -> int:
        return self.flops_of_one

    def freeing(self, places: frozenset[int]) -> CompiledCall:
        """Return the same call, with the arguments at these positions donated to it."""
        return CompiledCall(
            self.run, self.__name__, self.digest, self.side, self.flops_of_one, places
        )
