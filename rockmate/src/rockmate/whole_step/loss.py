"""A module and its loss as one, so that both are recorded, planned and bounded together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rockmate.errors import ArgumentsError
from rockmate.guards.module_watch import view_of

Loss = Callable[..., Tensor]
_OWN = "_rockmate_plain_class"  # in a class with a loss: the model's own


def with_loss(model: nn.Module, loss: Loss | None) -> nn.Module:
    """Return a view of `model`, of its class, whose forward returns the loss and the outputs.

    What the loss takes beside the outputs (targets) comes by name, or behind the model's arguments.

    Raises:
        ArgumentsError: it is no function, or has parameters to train.
    """
    if loss is None:
        return model
    names, kind = _targets(loss), type(model)
    if "forward" in vars(model):
        raise ArgumentsError(
            f"loss= is not taken for this {kind.__name__}, whose forward was put on the object "
            "itself. Compute the loss there, and return it beside the outputs."
        )

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        given = {name: kwargs.pop(name) for name in names if name in kwargs}
        rest = [name for name in names if name not in given]
        count = len(args) - len(rest)
        if count < 0:
            raise TypeError(f"the loss takes {rest}: give them behind the arguments, or by name")
        outputs = kind.forward(self, *args[:count], **kwargs)
        return loss(outputs, **dict(zip(rest, args[count:], strict=True)), **given), outputs

    def reduced(self: Any, protocol: Any) -> Any:
        return with_loss, (without_loss(self), loss)

    named = {n: getattr(kind, n) for n in ("__module__", "__qualname__", "__doc__")}
    space = {**named, "forward": forward, "__reduce_ex__": reduced, _OWN: kind}
    make: Any = type(kind)
    return view_of(model, make(kind.__name__, (kind,), space))


def without_loss(model: nn.Module) -> nn.Module:
    """Return the model that a loss was put behind."""
    kind = vars(type(model)).get(_OWN)
    return model if kind is None else view_of(model, kind)


def _targets(loss: Loss) -> list[str]:
    """Return the names of what a loss must be given, behind the outputs."""
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ArgumentsError(
            f"loss= takes a function of the outputs, and {type(loss).__name__} has parameters to "
            "train. Make it a submodule of the model, whose forward calls it."
        )
    try:
        of = loss.forward if isinstance(loss, nn.Module) else loss
        shown = inspect.signature(of).parameters.values()
    except (TypeError, ValueError):
        raise ArgumentsError(
            f"loss= takes a function of the outputs and of targets; a {type(loss).__name__} was "
            "given. Give loss=lambda y, target: ..."
        ) from None
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [p for p in shown if p.kind in plain]
    return [p.name for p in found[1:] if p.default is inspect.Parameter.empty]
