"""Numbers of a call in a recording: what follows from them, and where they decide more."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb.capture import for_any_number
from rkgb.elements import Numbers
from rkgb.elements.numbers import Comparison, TapeEntry, UnspecialisedFloat, UnspecialisedInt
from rkgb.engine import Sample, record


class Net(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 4), compute

    def forward(self, x: Tensor, t: float) -> Tensor:
        return self.compute(self.linear(x), t)


def numbers_of(compute: Callable[[Tensor, Any], Tensor], t: float = 0.3) -> Numbers | None:
    model = Net(compute)
    sample = Sample.of(model, (torch.randn(3, 4), t))
    basic = record(model, sample)
    whole = frozenset({1} if type(t) is int else ())
    made = for_any_number(basic, model, sample, whole)
    assert (made is basic) is (made.numbers is None)
    return made.numbers


def test_scalars_follow_from_the_call_as_python_computes_them() -> None:
    numbers = numbers_of(lambda x, t: x * (2 * t - 1) if t < 3 else x)
    assert numbers is not None
    assert numbers.of((None, 0.7)) == (2 * 0.7 - 1,)
    assert numbers.of((None, 3.0)) is None, "Python goes another way"
    assert numbers.of((None, math.nan)) is None
    # A backward takes another form of it.
    numbers = numbers_of(lambda x, t: (x + 2) ** t)
    assert numbers is not None
    assert numbers.of((None, 0.7)) == (0.7, 0.7 - 1.0)
    assert numbers.of((None, 0.0)) is None, "torch goes another way"


def test_ints_follow_as_ints_and_no_float_is_taken_for_one() -> None:
    numbers = numbers_of(lambda x, t: x * (2 * t - 1) + t / 4 if t < 300 else x, 3)
    assert numbers is not None
    found = numbers.of((None, 7))
    assert found == (13, 7 / 4)
    assert found is not None
    assert list(map(type, found)) == [int, float]
    assert numbers.of((None, 300)) is None, "Python goes another way"
    assert numbers.of((None, 7.0)) is None
    assert numbers.of((None, True)) is None
    assert numbers_of(lambda x, t: x * 2**t, 3) is None, "a power of ints may be a float"
    assert numbers_of(lambda x, t: x[:, :t].sum() * x, 3) is None
    assert numbers_of(lambda x, t: x * [1.0, 2.0, 3.0, 4.0, 5.0][t], 3) is None


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, t: x * math.exp(t),
        lambda x, t: x * round(t, 1),
        lambda x, t: x * (t // 0.25),  # the same nearby: it looks like a constant
        lambda x, t: x * torch.tensor(t),
        lambda x, t: x * t if type(t) is float else x,
        lambda x, t: x.normal_(t, 1.0) * x,
        lambda x, t: x * (t if torch.full((), t) > 0.1 else 1.0),
    ],
)
def test_what_decides_more_stays_what_it_is(compute: Callable[[Tensor, Any], Tensor]) -> None:
    assert numbers_of(compute) is None


def test_numbers_that_are_none() -> None:
    tape = (TapeEntry("float leaf", (0,)), TapeEntry("constant", (0.5,)), TapeEntry("pow", (0, 1)))
    numbers = Numbers(
        (*tape, TapeEntry("truediv", (1, 0))), (Comparison("ne", 0, 1, True),), (2, 3)
    )
    assert numbers.of((4.0,)) == (2.0, 0.125)
    assert numbers.of((0.5,)) is None
    assert numbers.of((0.0,)) is None, "a division by zero raises, which is the module's to do"
    assert numbers.of((-4.0,)) is None, "the root is complex"
    assert numbers.of((4,)) is None, "a whole number is another type"


def test_a_number_is_the_value_it_was_recorded_with_and_equal_to_none() -> None:
    number, whole = UnspecialisedFloat(0.5, 3), UnspecialisedInt(7, 3)
    assert number + 1 == 1.5
    assert whole + 1 == 8
    assert (repr(number), repr(whole)) == ("0.5", "7")
    assert number != 0.5
    assert whole != 7
    assert number != UnspecialisedFloat(0.5, 2)
    assert whole != UnspecialisedInt(7, 2)
    assert UnspecialisedFloat(7.0, 3) != whole
    for made in (number, whole):
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(other) is type(made)
            assert other == made
            assert hash(other) == hash(made)
