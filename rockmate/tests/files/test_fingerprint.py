"""Fingerprints tell bits apart, whatever the layout, and equal ones are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rkgb.engine import trace_memory
from rockmate.comparison.fingerprint import Fingerprints

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool)


def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7, 5), (300, 500), (3, 1, 70_000)])
def test_equal_bits_and_only_they_have_equal_fingerprints(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    take, value = Fingerprints(), tensor(dtype, *shape)
    expected = take.of(value)
    assert take.of(value.clone()) == expected
    if value.dim() > 1:  # elements count in their order, however they lie in memory
        assert take.of(value.transpose(0, 1).contiguous().transpose(0, 1)) == expected
        assert take.of(value.transpose(0, 1)) != expected
    for place in {0, value.numel() // 2, value.numel() - 1} if value.numel() else ():
        other = value.clone()
        flat = other.view(-1)
        flat[place] = ~flat[place] if dtype is torch.bool else flat[place] + 1
        assert take.of(other) != expected
    if value.numel() > 1:
        swapped = value.flatten().roll(1).view(shape)
        assert torch.equal(swapped, value) == (take.of(swapped) == expected)


def test_zeros_and_what_is_no_number_are_told_apart_by_their_bits() -> None:
    take = Fingerprints()
    assert take.of(torch.tensor([0.0])) != take.of(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert take.of(nan) == take.of(nan.clone())
    assert take.of("text") == "text"


def test_taking_one_allocates_nothing_and_leaves_few_traces() -> None:
    take, value = Fingerprints(), torch.randn(1 << 20)
    take.of(value)
    trace = trace_memory(lambda _span: take.of(value), torch.device("cpu"))
    assert trace.peak_bytes == 0
    assert not trace.timeline


def test_what_was_fingerprinted_can_still_be_freed() -> None:
    value = tensor(torch.float32, 100)
    Fingerprints().of(value)
    value.untyped_storage().resize_(0)  # as FSDP frees what it has gathered
    assert value.untyped_storage().nbytes() == 0
