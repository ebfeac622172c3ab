"""Parameters by their real paths in a module.

`named_parameters` may leave out a part of the path, as in torch's `checkpoint_wrapper`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def placed_parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the path by which `get_parameter` finds it."""
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)
