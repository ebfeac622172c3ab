"""Networks that are wide where a language model is: at its head, and within its blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, WIDTH, WORDS = 32, 8, 256


class Head(nn.Module):
    """Hidden states to a loss over many words, with targets that are ignored; tied if asked for."""

    def __init__(self, *, tied: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.smoothing = smoothing
        if tied:
            self.out.weight = self.words.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.out(self.norm(self.words(tokens)))
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=self.smoothing
        )


class Block(nn.Module):
    """A residual perceptron that is wide in between."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def words(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, WORDS, (2, 2, rows // 2))
    targets[0, :5] = -100
    return tokens, targets
