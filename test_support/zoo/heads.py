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
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
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


class Layer(nn.Module):
    """A layer of a language model of today: causal attention, and a gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        h = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Language(Head):
    """Layers between the words and the loss over them."""

    def __init__(self, depth: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.norm = nn.RMSNorm(WIDTH)
        self.layers = nn.Sequential(*(Layer(WIDTH) for _ in range(depth)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.out(self.norm(self.layers(self.words(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **self.options)


def words(batch: int = 2, length: int = ROWS // 2) -> tuple[Tensor, Tensor]:
    """Return tokens, and targets of which some are ignored."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, WORDS, (2, batch, length))
    targets[:1, :5] = -100
    return tokens, targets
