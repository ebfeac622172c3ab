"""Results that are no plain tensors: made again by each step, or refused in words."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb import TraceError
from rockmate import Rockmate


class Named(OrderedDict[str, Tensor]):
    """Gives its items as attributes, too."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Own(torch.Tensor):
    """A class of tensors."""


class Net(nn.Module):
    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.returns = nn.Linear(8, 8), nn.Linear(8, 4), returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(self.second(torch.tanh(self.first(x))))


def _planned(model: nn.Module, sample: Tensor) -> Rockmate:
    return Rockmate(model, (sample,), 10_000, cost="flops", cache=False, progress=False)


def test_an_ordered_dict_of_the_users() -> None:
    plain, sample = Net(lambda y: Named(second=y, first=y.sum())), torch.randn(6, 8)
    model = copy.deepcopy(plain)
    planned, found = _planned(model, sample), []
    for own, module in ((planned, model), (plain, plain)):
        result = own(sample)
        assert type(result) is Named
        assert [*result] == ["second", "first"]
        (result.second.square().sum() + result["first"]).backward()
        found.append([*result.values(), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "returns", [lambda y: y.as_subclass(Own), lambda y: [y.detach().as_subclass(Own), y]]
)
def test_a_class_of_tensors(returns: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="returns a tensor of the class Own"):
        _planned(Net(returns), torch.randn(6, 8))


def _with_default(y: Tensor) -> Any:
    def function(held: Tensor = y) -> Tensor:
        return held

    return function


@pytest.mark.parametrize(
    "returns",
    [
        lambda y: (y, lambda: 2 * y),
        lambda y: {"result": y, "function": lambda held=[y]: held},
        _with_default,
        lambda y: (y, y.sum),
    ],
    ids=["closure", "list", "default", "method"],
)
def test_functions_that_hold_tensors(returns: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="leads to tensors of this step"):
        _planned(Net(returns), torch.randn(6, 8))


def test_a_function_that_holds_none() -> None:
    plain, sample = Net(lambda y: (y, torch.relu, _with_default)), torch.randn(6, 8)
    result = _planned(plain, sample)(sample)
    assert result[1:] == (torch.relu, _with_default)
