"""GPT-2: a decoder of pre-norm transformer blocks, with the token embedding tied to the output."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each position to itself and the positions before it."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        self.n_heads = n_heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.n_heads, width // self.n_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.resid_dropout(self.proj(y.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a residual."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = CausalSelfAttention(d_model, n_heads, dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * d_model, d_model),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """Token indices (batch, length) to logits (batch, length, vocab).

    The defaults are GPT-2 small. Embedding and output share one parameter.
    """

    def __init__(
        self,
        nlayers: int = 12,
        dropout: float = 0.1,
        d_model: int = 768,
        n_heads: int = 12,
        vocab: int = 50257,
        max_length: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(max_length, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, dropout) for _ in range(nlayers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # residual branches start small, so that their sum does not grow
            for branch_end in (block.attention.proj, block.mlp[2]):
                nn.init.normal_(branch_end.weight, std=0.02 / math.sqrt(2 * nlayers))
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPT2WithLoss(GPT2):
    """GPT-2 with the loss inside: (indices, next indices) to the mean cross-entropy.

    A budget for this module covers the logits and the loss, which for a large vocabulary are the
    largest tensors of the step.
    """

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(idx)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
