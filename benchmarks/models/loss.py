"""A network and its loss as one module, so that a budget covers the whole step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

Loss = Callable[[Tensor, Tensor], Tensor]


class WithLoss(nn.Module):
    """Return `loss(model(*inputs), targets)`; the targets are the last argument."""

    def __init__(self, model: nn.Module, loss: Loss = F.cross_entropy) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *inputs_and_targets: Tensor) -> Tensor:
        *inputs, targets = inputs_and_targets
        return self.loss(self.model(*inputs), targets)


class WithLabels(nn.Module):
    """Return the loss that a language model of transformers computes itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss
