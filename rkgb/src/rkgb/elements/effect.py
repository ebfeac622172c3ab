"""Side effects of a forward, which a planned step repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.tensor_info import storage_id
from rkgb.elements.trees import refilled
from rkgb.errors import OtherWayError


@dataclass(frozen=True, slots=True)
class Assign:
    """An attribute or a buffer of a submodule that the forward sets without reading it before."""

    path: str
    name: str

    def apply(self, model: nn.Module, value: Any) -> None:
        """Set it on the model."""
        setattr(model.get_submodule(self.path), self.name, value)


@dataclass(frozen=True, slots=True)
class ObserverHook:
    """A forward hook of a submodule that observes: it computes nothing and returns nothing.

    It is called after the step, with tensors that gradients can flow back from.
    """

    path: str
    table: str  # "_forward_hooks" or "_forward_pre_hooks"
    key: int  # of the hook in the table

    def apply(self, model: nn.Module, value: Any) -> None:
        """Call the hook, if it is still registered, with the arguments of its recorded call."""
        module = model.get_submodule(self.path)
        hook = getattr(module, self.table).get(self.key)
        if hook is not None:
            hook(module, *value)


@dataclass(frozen=True, slots=True)
class InputMutation:
    """An argument that the forward changes in place. A step changes a copy and writes it back."""

    place: int  # among the leaves of the arguments

    def apply(self, leaves: Sequence[Any], value: Tensor) -> None:
        """Copy the new value into the argument of this call.

        Raises:
            OtherWayError: another argument shares its memory; the forward would change both.
        """
        own = leaves[self.place]
        others = [t for t in leaves if t is not own and isinstance(t, Tensor)]
        if any(storage_id(other) == storage_id(own) for other in others):
            raise OtherWayError(
                "the forward changes an argument that shares its memory with another one."
            )
        with torch.no_grad():
            own.copy_(value)


@dataclass(frozen=True, slots=True)
class ContainerMutation:
    """An argument that is a container or an object whose content the forward changes.

    Mostly a cache, which gets the keys and values of this call.
    """

    place: int | str  # of the argument: its position, or its keyword

    def apply(self, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        """Give the argument of this call the content of `value`."""
        old = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        refilled(old, value)


@dataclass(frozen=True, slots=True)
class Assertion:
    """An assert, or an `if` that raises, on a value that the forward computes."""

    path: str
    source: str
    seen: bool

    def apply(self, _model: nn.Module, value: Tensor) -> None:
        """Compare the value of this step with the recorded one.

        Raises:
            OtherWayError: they differ.
        """
        if bool(value) != self.seen:
            raise OtherWayError(
                f"the check at {self.source} in module '{self.path or '(root)'}' failed."
            )


Effect = Assign | ObserverHook | InputMutation | ContainerMutation | Assertion
