"""A classifier and its loss as one module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)


class WithLoss(nn.Module):
    """Return the mean cross-entropy of `model(x)`, so that a budget covers the whole step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), targets)
