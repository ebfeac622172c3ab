"""Tensors to which a forward writes by another way than the module: planning puts them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate

held: dict[str, Tensor] = {}


class Net(nn.Module):
    """Counts its calls in a buffer, and in a tensor that is none."""

    def __init__(self, adds: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second, self.adds = nn.Linear(8, 8), nn.Linear(8, 4), adds
        self.register_buffer("count", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        self.adds()
        found: Tensor = self.second(torch.tanh(self.first(x))) * (self.count + self.plain)
        return found + sum(t.sum() for t in held.values())


def _of_a_closure() -> Net:
    count = torch.zeros(4)
    held["count"] = count  # read by the forward, too
    return Net(lambda: count.add_(1))


def _several() -> Net:
    held.update(first=torch.zeros(4), second=torch.zeros(2))
    return Net(lambda: [one.add_(1) for one in held.values()])


def _of_numpy() -> Net:
    held["array"] = torch.from_numpy(np.zeros(4, dtype=np.float32))
    return Net(lambda: held["array"].add_(1))


def _own(name: str, changed: Callable[[Tensor], Tensor] = lambda t: t) -> Callable[[], Net]:
    def make() -> Net:
        net = Net(lambda: own["held"].add_(1))
        own: dict[str, Any] = {"held": changed(getattr(net, name))}
        return net

    return make


MAKES: dict[str, Callable[[], Net]] = {
    "a closure": _of_a_closure,
    "several": _several,
    "memory of numpy": _of_numpy,
    "an own buffer": _own("count"),
    "a part of an own buffer": _own("count", lambda t: t[:2]),
    "an own tensor": _own("plain"),
}


@pytest.mark.parametrize("name", MAKES)
def test_steps_write_as_the_plain_forward_does(name: str) -> None:
    found, before = [], []
    for is_planned in (True, False):
        held.clear()
        torch.manual_seed(0)
        model, sample = MAKES[name](), torch.randn(6, 8)
        own: Any = model
        if is_planned:
            own = Rockmate(model, (sample,), 1.0, cost="flops", cache=False, progress=False)
        tensors = [model.count, model.plain, *held.values()]
        before.append([t.clone() for t in tensors])
        results = [own(sample) for _ in range(3)]
        results[-1].square().sum().backward()
        found.append([*results, *tensors, *(p.grad for p in model.parameters())])
        assert not all(map(torch.equal, before[-1], tensors))
    held.clear()
    assert all(map(torch.equal, *before)), "planning leaves them"
    assert all(map(torch.equal, *found))
