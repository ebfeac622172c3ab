"""Sums of gradients have autograd's order and its strides, whatever uses a value has."""

from __future__ import annotations

import random

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from oracles.gradients import assert_same_gradients
from rkgb.capture.record import make_B
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S

SIZE = 24


class RandomUses(nn.Module):
    """Square matrices used straight, transposed, in parts and in place, as a seed says.

    Gradients of the factors are reductions, which round by the strides of what they reduce.
    """

    FACTORS = ((), (1, SIZE), (SIZE, 1), (SIZE,))

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        source = random.Random(seed)
        kinds = (
            "turn", "factor", "factor", "add", "mul", "tanh", "softmax", "matmul", "parts",
            "copy", "mean", "iadd", "view", "relu_", "diagonal", "flip",
        )  # fmt: skip
        self.plan = [
            (source.choice(kinds), source.random(), source.random()) for _ in range(length)
        ]
        self.factors = nn.ParameterList(
            nn.Parameter(torch.randn(source.choice(self.FACTORS))) for _ in range(length + 1)
        )
        self.weights = torch.randn(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        pool = [x * self.factors[0]]
        for factor, (kind, first, second) in zip(self.factors[1:], self.plan, strict=True):
            a, b = pool[int(first * len(pool))], pool[int(second * len(pool))]
            pool.append(self.apply_kind(kind, a, b, factor))
        return sum((t.tanh() * self.weights).sum() for t in pool[-3:])  # type: ignore[return-value]

    def apply_kind(self, kind: str, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
        match kind:
            case "turn":
                return a.t()
            case "factor":
                return a * factor
            case "add":
                return a + b
            case "mul":
                return a * b
            case "tanh":
                return a.tanh()
            case "softmax":
                return a.softmax(0)
            case "matmul":
                return a @ b / SIZE
            case "parts":
                left, right = a.chunk(2, 1)
                return torch.cat([right, left.sin()], 1)
            case "copy":
                return a.clone(memory_format=torch.contiguous_format)
            case "mean":
                return a.mean(1, keepdim=True).expand(SIZE, SIZE)
            case "iadd":
                c = a * 0.5
                c += b
                return c
            case "view":
                return a.reshape(4, -1).cumsum(0).reshape(SIZE, SIZE)
            case "relu_":
                return (a + 0.1).relu_().t()
            case "diagonal":
                return a + a.diagonal()
            case _:
                return a.flip(0)


def check(seed: int, length: int) -> None:
    torch.manual_seed(seed)
    model = RandomUses(seed, length)
    sample = (torch.randn(SIZE, SIZE),)
    graph = D_to_S(B_to_D(make_B(model, sample)))
    assert_same_gradients(graph, model, sample)


@given(seed=st.integers(0, 2**32), length=st.integers(3, 14))
@example(seed=200, length=3)  # a sum that lay in memory like its second term
@example(seed=256, length=10)
def test_random_uses_of_matrices(seed: int, length: int) -> None:
    check(seed, length)
