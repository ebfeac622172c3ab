"""Functions of torch that take numbers out of tensors by themselves: no operation shows that.

How many rows a packed sequence has at each step, how long an input of CTC is, where a tensor is
split: what torch computes depends on it, while every shape stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from oracles.training import assert_trains_like, eager_copy
from runs.planned import wrap

LONG, SHORT = torch.tensor([7, 5, 3, 2]), torch.tensor([7, 7, 2, 1])  # 17 rows each


class Steps(nn.Module):
    """One layer around a function of what it computes and of lengths."""

    def __init__(self, run: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.GRU(8, 8)
        self.run = run

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.run(self.inner, self.first(x).tanh(), lengths).square().mean()


def recurrent(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return rnn.pad_packed_sequence(inner(rnn.pack_padded_sequence(x, lengths))[0])[0]


def packed(_: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return rnn.pack_padded_sequence(x, lengths).data.cumsum(0)


def given_packed(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return inner(rnn.PackedSequence(x.flatten(0, 1)[:17], lengths))[0].data


def unpacked(_: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    rows = rnn.PackedSequence(x.flatten(0, 1)[:17], lengths)
    return rnn.pad_packed_sequence(rows)[0].cumsum(0)


def split(_: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    first, *_others = x.tensor_split(lengths[2:].flip(0), 0)
    return first.sum() + x.sum()


def ctc(_: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    labels = torch.arange(8).reshape(4, 2) % 7 + 1
    wanted = torch.full((4,), 2)
    return functional.ctc_loss(x.log_softmax(-1), labels, lengths, wanted, zero_infinity=True)


def rows_of(lengths: Tensor) -> Tensor:
    """Return how many sequences there are at each step."""
    return (lengths > torch.arange(7)[:, None]).sum(1)


@pytest.mark.parametrize("run", [recurrent, packed, given_packed, unpacked, split, ctc])
def test_other_numbers_are_noticed(run: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Steps(run), torch.randn(7, 4, 8)
    made = rows_of if run in (given_packed, unpacked) else lambda lengths: lengths
    twin, rk = eager_copy(model), wrap(model, (x, made(LONG)), "1MiB")
    for lengths in (LONG, SHORT, LONG):
        assert_trains_like(rk, twin, (x, made(lengths)), steps=1)


def test_packed_sequences_come_and_go() -> None:
    torch.manual_seed(0)
    model = nn.GRU(8, 8)
    sample = rnn.pack_padded_sequence(torch.randn(7, 4, 8), LONG)
    twin, rk = eager_copy(model), wrap(model, (sample,), "1MiB")
    for call in (sample, rnn.pack_padded_sequence(torch.randn(7, 4, 8), SHORT)):
        found, expected = rk(call), twin(call)
        assert type(found[0]) is rnn.PackedSequence
        for ours, theirs in zip(
            (*found[0][:2], found[1]), (*expected[0][:2], expected[1]), strict=True
        ):
            assert torch.equal(ours, theirs)
        (found[0].data.sum() + found[1].sum()).backward()
        (expected[0].data.sum() + expected[1].sum()).backward()
        for ours, theirs in zip(rk.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
