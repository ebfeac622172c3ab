"""What an operation calls where that is no operation of torch's own, and what others ask of it.

Graphs, costs and programs know no kind of such a target: they ask `target_of(op)`. Who brings
operations of a new kind derives from `Target` and says what is otherwise than for torch's own. Two
targets are where a backward passes the gradient of an output to autograd, part by part, and gets it
back. An output may be used by other outputs, as a hidden state beside the result is. Its gradient
then belongs to autograd, which adds gradients from outside and runs hooks. `GradientPart` adds a
part to the value that autograd holds, and `GradientCut` takes the sum.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn

from rkgb.elements.op import Op

# Takes a list of arguments, which it empties.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class OpCost:
    """Time and temporary memory of one call; `workspace_bytes` is above what it returns."""

    time_ms: float
    flops: int = 0
    workspace_bytes: int = 0


class WholeCall(Protocol):
    """A call of the user's own Python, as the sample's step has seen it."""

    @property
    def path(self) -> str: ...  # of the submodule
    @property
    def kind(self) -> str: ...  # name of its class
    @property
    def function(self) -> Any: ...  # of autograd, that is called instead of a submodule
    @property
    def plain_values(self) -> Sequence[Any]: ...  # that it gets beside tensors and numbers
    @property
    def held_bytes(self) -> int: ...  # until its backward
    @property
    def buffer_bytes(self) -> int: ...  # of copies for a recomputation; 0 where it writes to none
    @property
    def time_ms(self) -> tuple[float, float]: ...
    @property
    def runs_once(self) -> bool: ...  # no recomputation would find again what it found
    @property
    def reads(self) -> Any: ...  # what its Python may read outside (`rkgb.guards.Readable`)
    @property
    def written(self) -> tuple[str, ...]: ...  # parameters
    @property
    def casts(self) -> tuple[str, ...]: ...  # parameters that autocast casts in it
    @property
    def draws(self) -> bool: ...  # random numbers in its backward
    @property
    def inner(self) -> tuple[int, ...]: ...  # results whose gradients are put together inside


class Restart:
    """What a recomputation that runs Python starts from."""

    tensors: Mapping[str, Tensor]  # that the Python may read, by name; they must not change


class Target:
    """A callable that is no operation of torch's; the defaults are those of torch's own."""

    __name__: str
    __call__: Callable[..., Any]
    whole: WholeCall | None = None  # of a forward that is the user's own Python
    runs_python = False  # forward or backward
    # What a forward leaves follows from the backward, which computes the rest again.
    is_half = False
    recorded: Sequence[Op] = ()  # operations as recorded, which it runs part by part
    rounds = 1  # how many parts
    run: Boxed | None = None  # the call with its arguments in a list, if that can free them
    frees: frozenset[int] = frozenset()  # places of arguments that are nobody else's

    def freeing(self, places: frozenset[int], own: frozenset[int]) -> Self:
        """Return the same call, which frees the arguments in these places that it can free.

        What is in places of `own` was made by the backward, and it may write there.
        """
        return self

    def cost(self, op: Op) -> OpCost | None:
        """Return what a call is known to cost; None where it is to be measured."""
        return None

    def flops(self, count: Callable[[Op], int]) -> int | None:
        """Return the FLOPs of a call, where its kernel's formula does not say; `count` asks it."""
        return None

    def inner_bytes(self, like: Sequence[Any]) -> int | None:
        """Return the peak of a call on tensors without content, results included, if it is known.

        Workspaces of kernels come on top.
        """
        return None

    def again(self, op: Op) -> Op:
        """Return what a recomputation runs."""
        return op

    def once(self, op: Op) -> Op:
        """Return what a step runs that does not run it again later."""
        return op

    def costs_as(self, other: object) -> bool:
        """Whether another target makes, holds, reads and takes the same."""
        return self is other or self == other

    def is_of_kind(self, other: object) -> bool:
        """Whether another target is the same but for plain values that it is called with."""
        return self is other or self == other

    def takes_as(self, other: object) -> bool:
        """Whether another target is called with the same plain values, but for numbers."""
        return True


_TORCHS = Target()


def target_of(op: Op) -> Target:
    """Return what an operation calls, as others look at it."""
    return op.target if isinstance(op.target, Target) else _TORCHS


_running = threading.local()


@contextlib.contextmanager
def running_on(model: nn.Module) -> Iterator[None]:
    """While active, calls of the user's own Python run the submodules of this model."""
    before = getattr(_running, "model", None)
    _running.model = model
    try:
        yield
    finally:
        _running.model = before


def running_model() -> nn.Module:
    """Return the model whose step runs."""
    model = getattr(_running, "model", None)
    assert isinstance(model, nn.Module), "no model to run on"
    return model


@dataclass(frozen=True)
class ThroughAutograd(Target):
    """What a backward passes to autograd, or takes from it, of the gradient of an output."""

    root: str  # the output
    from_outside: bool

    def cost(self, op: Op) -> OpCost:
        return OpCost(0.0)


class GradientPart(ThroughAutograd):
    """Passes a part of an output's gradient to autograd.

    It comes `from_outside` if it is the first part and is added to a gradient from outside.
    """

    __name__ = "part"

    def __call__(self, *parts: Tensor) -> Tensor:
        """Return what autograd then holds: the part, added to the sum so far if there is one."""
        return parts[0] + parts[1] if len(parts) > 1 else parts[0]


class GradientCut(ThroughAutograd):
    """Takes the whole gradient of an output from autograd.

    It comes `from_outside` if autograd also holds one from outside, from the beginning on.
    """

    __name__ = "cut"

    def __call__(self, held: Tensor) -> Tensor:
        """Return the gradient as it is, the case in which no hook changes it."""
        return held
