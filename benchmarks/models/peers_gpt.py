"""The 8-layer GPT of the peers' table, its loss inside."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.ln1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The network of the peers' table, its loss inside."""

    def __init__(self, layers: int = 8, width: int = 256, length: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1024, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1024, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
