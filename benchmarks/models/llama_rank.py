"""A Llama's layer as one rank of a tensor-parallel group runs it, by sizes alone.

What CUDA has kernels for is one operation here, which saves what the kernel saves: RMSNorm its
input, FlashAttention queries, keys, values, output and one number for each row. Collectives
are operations too. They count as the FLOPs that the rank could do meanwhile (see `Links`). All of
these leave their results unset, because only sizes count. The rotation of positions is left out:
it saves nothing and costs little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula


@dataclass(frozen=True)
class Llama:
    """The shapes of a Llama, and how many tokens a sequence has."""

    name: str
    layers: int
    width: int
    heads: int
    groups: int  # heads of keys and values
    inner: int
    vocab: int
    tokens: int

    @property
    def kept_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.width // self.heads * self.groups

    @property
    def layer_parameters(self) -> int:
        """Number of the parameters of a layer."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kept_width
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def end_parameters(self) -> int:
        """Number of the parameters of the head and its norm; the embedding has the head's."""
        return self.vocab * self.width + self.width

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer_parameters + self.end_parameters + self.vocab * self.width


@dataclass
class Links:
    """How many FLOPs a rank does in the time in which a byte crosses a link of its group."""

    flops_per_byte: float = 0.0


LINKS = Links()


def _op(name: str, signature: str, sizes: Callable[..., Any]) -> Any:
    """Return an operation that makes results of these sizes."""
    made = torch.library.custom_op(f"scale::{name}", sizes, mutates_args=(), schema=signature)
    made.register_fake(sizes)
    return getattr(torch.ops.scale, name)


_rms_norm = _op(
    *("rms_norm", "(Tensor x, Tensor weight) -> (Tensor, Tensor)"),
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
_rms_norm_backward = _op(
    *("rms_norm_backward", "(Tensor g, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)"),
    lambda g, x, weight, r: (torch.empty_like(x), torch.empty_like(weight)),
)
_attention = _op(
    *("attention", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"),
    lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)),
)
_attention_backward = _op(
    "attention_backward",
    "(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor sums) -> (Tensor, Tensor, Tensor)",
    lambda g, q, k, v, o, sums: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)
_gather = _op(
    *("gather", "(Tensor x, int ranks) -> Tensor"),
    lambda x, ranks: x.new_empty(x.shape[0] * ranks, *x.shape[1:]),
)
_scatter = _op(
    *("scatter", "(Tensor x, int ranks) -> Tensor"),
    lambda x, ranks: x.new_empty(x.shape[0] // ranks, *x.shape[1:]),
)


def _attention_flops(q: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Return the FLOPs of causal attention: two products, of which half is left out."""
    sequences, rows, heads, each = q
    return int(2 * sequences * rows * rows * heads * each)


def _link_flops(whole: Any, ranks: int, **_: Any) -> int:
    """Return the FLOPs in the time in which a rank gets, or sums up, the parts of the others."""
    size = 2 * (ranks - 1) / ranks  # bytes of each number that is not here
    for length in whole:
        size *= length
    return int(LINKS.flops_per_byte * size)


register_flop_formula(torch.ops.scale.attention)(_attention_flops)
register_flop_formula(torch.ops.scale.attention_backward)(
    lambda g, *_, **__: 5 * _attention_flops(g) // 2
)
register_flop_formula(torch.ops.scale.gather)(lambda x, ranks, **_: _link_flops((ranks, *x), ranks))
register_flop_formula(torch.ops.scale.scatter)(lambda x, ranks, **_: _link_flops(x, ranks))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, rstd = _rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _rms_norm_backward(grad, *ctx.saved_tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = _attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _attention_backward(grad, *ctx.saved_tensors)


class _Collective(torch.autograd.Function):
    """Runs one collective, and in the backward the one that undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, run: Any, back: Any) -> Any:
        ctx.ranks, ctx.back = ranks, back
        return run(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.ranks), None, None, None


def gathered(x: Tensor, ranks: int) -> Tensor:
    """Return all tokens, of which each rank of the group has its share."""
    return _Collective.apply(x, ranks, _gather, _scatter) if ranks > 1 else x


def scattered(x: Tensor, ranks: int) -> Tensor:
    """Return this rank's tokens of the sum over the group."""
    return _Collective.apply(x, ranks, _scatter, _gather) if ranks > 1 else x


class Norm(nn.Module):
    """RMSNorm as one kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight)


class Layer(nn.Module):
    """One layer on one of `ranks` ranks: its heads, its share of the inner width, of the tokens.

    Takes and returns the rank's share of the tokens of all sequences, (tokens / ranks, width).
    """

    def __init__(self, size: Llama, ranks: int) -> None:
        super().__init__()
        self.ranks, self.rows, self.each = ranks, size.tokens, size.width // size.heads
        own, kept = size.width // ranks, size.kept_width // ranks
        self.norm1, self.norm2 = Norm(size.width), Norm(size.width)
        self.q, self.o = _linear(size.width, own), _linear(own, size.width)
        self.k, self.v = _linear(size.width, kept), _linear(size.width, kept)
        inner = size.inner // ranks
        self.gate, self.up = _linear(size.width, inner), _linear(size.width, inner)
        self.down = _linear(inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        y = gathered(self.norm1(x), self.ranks)
        q, k, v = (
            p(y).unflatten(-1, (-1, self.each)).unflatten(0, (-1, self.rows))
            for p in (self.q, self.k, self.v)
        )
        y = _Attention.apply(q, k, v).flatten(2).flatten(0, 1)
        x = x + scattered(self.o(y), self.ranks)
        y = gathered(self.norm2(x), self.ranks)
        return x + scattered(self.down(F.silu(self.gate(y)) * self.up(y)), self.ranks)


class Ends(nn.Module):
    """What comes after the layers: norm, this rank's words of the head, and the loss over these.

    The sums over the words of the others are one number for each token, and are left out.
    """

    def __init__(self, size: Llama, ranks: int) -> None:
        super().__init__()
        self.ranks, self.norm = ranks, Norm(size.width)
        self.head = _linear(size.width, size.vocab // ranks)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(gathered(self.norm(x), self.ranks)).float(), targets)


def _linear(given: int, made: int) -> nn.Linear:
    return nn.Linear(given, made, bias=False)
