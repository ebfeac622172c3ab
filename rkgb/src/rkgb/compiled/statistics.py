"""Running statistics of batch norms, which are updated after the piece that computes them."""

from __future__ import annotations

from torch import Tensor


class MoveStatistics:
    """Update the running statistics of a batch norm by those of a batch, as eager does."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.__name__ = "move_statistics"

    def __repr__(self) -> str:
        return f"rkgb.move_statistics {self.momentum!r}"

    def __call__(self, mean: Tensor, variance: Tensor, new_mean: Tensor, new: Tensor) -> None:
        for running, batch in ((mean, new_mean), (variance, new)):
            running.mul_(1 - self.momentum).add_(batch, alpha=self.momentum)
