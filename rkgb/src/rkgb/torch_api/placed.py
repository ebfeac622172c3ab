"""Parameters by where they lie in a module, and others in their places.

`named_parameters` may leave out a part of the path, as in torch's `checkpoint_wrapper`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def placed_parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the path by which `get_parameter` finds it."""
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)


def leaf_of_kind(like: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """Return a leaf on this memory, of the type of a parameter and with its attributes.

    Types of libraries keep what their memory means in attributes, as the states of quantised
    weights are. What is set in those of one is set in those of both.
    """
    made = nn.Parameter(memory, like.requires_grad)
    if type(made) is not type(like):
        made.__class__ = type(like)
    if vars(like):
        made.__dict__ = vars(like)
    return made
