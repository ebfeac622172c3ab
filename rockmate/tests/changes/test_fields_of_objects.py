"""What functions, classes and other objects have beside their dicts, changed between steps."""

from __future__ import annotations

import contextvars
import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate

Reads = Callable[[], float]


def told(a: int = 1, *, b: int = 2) -> int:
    """Return something."""
    return a + b


class Base:
    """A class."""


class Other(Base):
    """Another one."""


class Derived(Base):
    """Derives from the first."""


class Apart:
    """Has nothing to do with them."""


class Slots:
    __slots__ = ("kept",)


class KindError(Exception):
    """Holds its arguments in C."""


class Net(nn.Module):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.first, self.second, self.reads = nn.Linear(8, 8), nn.Linear(8, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x))) * self.reads()
        return found


variable = contextvars.ContextVar("variable", default=1.0)
context, slots, error = contextvars.copy_context(), Slots(), KindError(1.0)
ended: list[Any] = []


def _finalized(value: float) -> None:
    if value == 1.0:
        owner = Base()
        ended[:] = [owner]
        globals()["final"] = weakref.finalize(owner, int)
    else:
        ended.clear()


CASES: dict[str, tuple[Reads, Callable[[Any], object], Any, Any]] = {
    "text of a function": (
        lambda: len(told.__doc__ or ""),
        lambda new: setattr(told, "__doc__", new),
        *("one", "another"),
    ),
    "name of a function": (
        lambda: len(told.__name__),
        lambda new: setattr(told, "__name__", new),
        *("told", "told_again"),
    ),
    "a name that is put together": (
        lambda: len(getattr(told, "__qual" + "name__")),
        lambda new: setattr(told, "__qualname__", new),
        *("told", "told_again"),
    ),
    "annotations": (
        lambda: len(told.__annotations__),
        lambda new: setattr(told, "__annotations__", new),
        *({"a": int}, {"a": int, "b": int}),
    ),
    "one annotation": (
        lambda: told.__annotations__["c"],
        lambda new: told.__annotations__.update(c=new),
        *(1.0, 2.0),
    ),
    "defaults": (
        lambda: sum(told.__defaults__ or ()),
        lambda new: setattr(told, "__defaults__", new),
        *((1,), (2,)),
    ),
    "name of a class": (
        lambda: len(Base.__name__),
        lambda new: setattr(Base, "__name__", new),
        *("Base", "Basis"),
    ),
    "full name of a class": (
        lambda: len(Base.__qualname__),
        lambda new: setattr(Base, "__qualname__", new),
        *("Base", "Basis"),
    ),
    "bases": (
        lambda: len(Derived.__bases__),
        lambda new: setattr(Derived, "__bases__", new),
        *((Base,), (Base, Apart)),
    ),
    "whether one class is another's": (
        lambda: 1.0 if issubclass(Derived, Other) else 2.0,
        lambda new: setattr(Derived, "__bases__", new),
        *((Base,), (Other,)),
    ),
    "order of classes": (
        lambda: len(Derived.__mro__),
        lambda new: setattr(Derived, "__bases__", new),
        *((Base,), (Other,)),
    ),
    "variables of a module by a text": (
        lambda: vars(sys.modules[__name__])["variable_by_text"],
        lambda new: globals().update(variable_by_text=new),
        *(1.0, 2.0),
    ),
    "another context": (
        lambda: context.run(variable.get),
        lambda new: context.run(variable.set, new),
        *(1.0, 2.0),
    ),
    "whether something has ended": (lambda: 2.0 if final.alive else 3.0, _finalized, 1.0, 2.0),
    "a slot": (lambda: slots.kept, lambda new: setattr(slots, "kept", new), 1.0, 2.0),
    "what is written in C": (
        lambda: sum(error.args),
        lambda new: setattr(error, "args", new),
        *((1.0,), (2.0,)),
    ),
}
final: Any = None


@pytest.mark.parametrize("name", CASES)
def test_a_change_between_steps(name: str) -> None:
    reads, change, before, after = CASES[name]
    torch.manual_seed(0)
    plain, sample = Net(reads), torch.randn(6, 8)
    change(before)
    model = copy.deepcopy(plain)
    planned = Rockmate(model, (sample,), 1.0, cost="flops", cache=False, progress=False)
    assert not planned.plan.opaque
    seen = []
    try:
        for value in (before, after, before):
            change(value)
            found = []
            for own, module in ((planned, model), (plain, plain)):
                module.zero_grad()
                result = own(sample)
                result.square().sum().backward()
                found.append([result.detach(), *(p.grad.clone() for p in module.parameters())])
            assert all(map(torch.equal, *found))
            seen.append(found[0][0])
    finally:
        change(before)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
