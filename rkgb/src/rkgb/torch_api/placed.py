"""Parameters by where they lie in a module, and others in their places.

`named_parameters` may leave out a part of the path, as in torch's `checkpoint_wrapper`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def placed_parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the path by which `get_parameter` finds it."""
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)


def leaf_of_kind(like: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """Return a leaf on this memory, of the type of a parameter; it has no attributes yet."""
    made = nn.Parameter(memory, like.requires_grad)
    if type(memory) is Tensor and type(like) is not nn.Parameter:
        made.__class__ = type(like)
    return made


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor in which a library or a user keeps what it means.

    A tensor around others has these among its own, and looks after them itself.
    """
    return {} if hasattr(type(tensor), "__tensor_flatten__") else vars(tensor)


def share_attributes(leaf: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let what is set on one be set on the other."""
    if attributes_of(parameter):
        leaf.__dict__ = vars(parameter)
