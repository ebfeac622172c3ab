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
from rkgb.elements.numbers import Compared, Made, Number
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
    made = for_any_number(basic, model, sample)
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
    tape = (Made("leaf", (0,)), Made("constant", (0.5,)), Made("pow", (0, 1)))
    numbers = Numbers((*tape, Made("truediv", (1, 0))), (Compared("ne", 0, 1, True),), (2, 3))
    assert numbers.of((4.0,)) == (2.0, 0.125)
    assert numbers.of((0.5,)) is None
    assert numbers.of((0.0,)) is None, "a division by zero raises, which is the module's to do"
    assert numbers.of((-4.0,)) is None, "the root is complex"
    assert numbers.of((4,)) is None, "a whole number is another type"


def test_a_number_is_the_value_it_was_recorded_with_and_equal_to_none() -> None:
    number = Number(0.5, 3)
    assert number + 1 == 1.5
    assert repr(number) == "0.5"
    assert number != 0.5
    assert number != Number(0.5, 2)
    for other in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert other == number
        assert hash(other) == hash(number)
