"""Networks that are wide where a language model is: at its head, and within its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, WIDTH, WORDS = 32, 8, 256


class Head(nn.Module):
    """Hidden states to a loss over many words; tied if asked for, with options of the loss."""

    def __init__(self, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.options = options
        if tied:
            self.out.weight = self.words.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.out(self.norm(self.words(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **self.options)


class Block(nn.Module):
    """A residual perceptron that is wide in between."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def words(batch: int = 2, length: int = ROWS // 2) -> tuple[Tensor, Tensor]:
    """Return tokens, and targets of which some are ignored."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, WORDS, (2, batch, length))
    targets[:1, :5] = -100
    return tokens, targets
