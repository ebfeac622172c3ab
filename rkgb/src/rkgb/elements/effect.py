"""What a forward leaves behind besides its result, and a step leaves behind as well."""

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
    """An attribute or a buffer of a submodule that the forward has set, and not read before."""

    path: str
    name: str

    def apply(self, model: nn.Module, value: Any) -> None:
        """Set it on the model."""
        setattr(model.get_submodule(self.path), self.name, value)


@dataclass(frozen=True, slots=True)
class Look:
    """A forward hook of a submodule that only looks: it computes nothing and returns nothing.

    It is called after the step, with tensors that a gradient can flow back from.
    """

    path: str
    table: str  # "_forward_hooks" or "_forward_pre_hooks"
    key: int  # of the hook in the table

    def apply(self, model: nn.Module, value: Any) -> None:
        """Call the hook, if it is still there, on the arguments that it got when recorded."""
        module = model.get_submodule(self.path)
        hook = getattr(module, self.table).get(self.key)
        if hook is not None:
            hook(module, *value)


@dataclass(frozen=True, slots=True)
class Write:
    """An argument that the forward changes in place: the step works on a copy, and writes it."""

    place: int  # among the leaves of the arguments

    def apply(self, leaves: Sequence[Any], value: Tensor) -> None:
        """Write it.

        Raises:
            OtherWayError: another argument lies in the same memory, and would have changed too.
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
class Refill:
    """An argument that is a container or an object, and holds something else after the forward.

    A cache, mostly, which gets the keys and values of this call.
    """

    place: int | str  # of the argument: its position, or its keyword

    def apply(self, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        """Let the argument of this call hold that."""
        old = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        refilled(old, value)


@dataclass(frozen=True, slots=True)
class Check:
    """An assert, or an `if` that raises, on a value that the forward computes."""

    path: str
    source: str
    seen: bool

    def apply(self, _model: nn.Module, value: Tensor) -> None:
        """Look at the value of this step.

        Raises:
            OtherWayError: it is not what the recording saw.
        """
        if bool(value) != self.seen:
            raise OtherWayError(
                f"the check at {self.source} in module '{self.path or '(root)'}' failed."
            )


Effect = Assign | Look | Write | Refill | Check
