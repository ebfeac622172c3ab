"""Attributes of planned classes: `forward`, the call that `compile()` makes, and `memory`."""

from __future__ import annotations

import functools
import sys
from itertools import takewhile
from typing import Any

import torch

# What torch.compile(..., fullgraph=True) says of a planned module.
_WHY_OPAQUE = (
    "A Rockmate module runs a planned program of kernels below autograd, which torch.compile "
    "cannot look into. Leave fullgraph=True out, and compile what is planned: "
    "Rockmate(..., compile=True)."
)


_DERIVED = "_rockmate_derived"  # attribute of a class that `_plain_class` has made


@functools.cache
def _plain_class(kind: Any, base: Any) -> Any:
    """Return `base` with the properties of a class derived from a planned one.

    Torch gives a module with parametrizations such a class: the weights are properties.
    """
    derived = takewhile(lambda own: "forward" not in vars(own), kind.__mro__)
    space = {n: v for own in derived for n, v in vars(own).items() if isinstance(v, property)}
    return type(base)(kind.__name__, (base,), {**space, _DERIVED: True})


class ForwardAttribute:
    """`forward` of a planned class; it precedes a `forward` among the model's own attributes."""

    def __init__(self, base: Any) -> None:
        @functools.wraps(base.forward)  # trainers look at its signature
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            planned = getattr(self, "_rockmate", None)
            if planned is None or planned.table is not vars(self):  # a replica
                return base.forward(self, *args, **kwargs)
            kind: Any = type(self)
            view: Any = planned.model
            if "forward" not in vars(kind) and "parametrizations" in self._modules:
                view.__class__ = _plain_class(kind, base)
            elif _DERIVED in type(view).__dict__:
                view.__class__ = base
            return planned(args, kwargs)

        self.plain, self.untraced = forward, None

    @property
    def function(self) -> Any:
        """The forward, closed to torch.compile, whose import (a second) it does not cause."""
        if self.untraced is None and "torch._dynamo" in sys.modules:
            self.untraced = torch.compiler.disable(self.plain, reason=_WHY_OPAQUE)
        return self.untraced or self.plain

    def __get__(self, module: Any, _: type | None = None) -> Any:
        if module is None:
            return self.function
        planned = getattr(module, "_rockmate", None)
        if planned is not None and planned.forward is not None:
            return planned.forward
        if torch.compiler.is_dynamo_compiling():  # it knows only this way to bind
            return functools.partial(self.function, module)
        return self.function.__get__(module)

    def __set__(self, module: Any, value: Any) -> None:
        module._rockmate.forward = value

    def __delete__(self, module: Any) -> None:
        if module._rockmate.forward is None:
            raise AttributeError("forward")
        module._rockmate.forward = None


class CompiledCallAttribute:
    """The call that `wrapper.compile()` makes, separate from that of `model.compile()`.

    Wrapper and model share their attributes. In them, a call of one would run the other.
    """

    def __get__(self, module: Any, _: type | None = None) -> Any:
        planned = getattr(module, "_rockmate", None)
        return None if planned is None else planned.compiled_call

    def __set__(self, module: Any, value: Any) -> None:
        module._rockmate.compiled_call = value


class WholeStepAttribute:
    """The table of a step's memory (`Memory`); a model's attribute `memory` takes precedence."""

    def __get__(self, rk: Any, _: type | None = None) -> Any:
        if rk is None:
            return self
        for table in ("_parameters", "_buffers", "_modules"):
            if "memory" in vars(rk)[table]:
                return vars(rk)[table]["memory"]
        found = rk._rockmate.memory()
        if found is None:
            raise AttributeError(f"{type(rk).__name__} has no memory: none was given, or no step")
        return found
