"""Parameters by where they lie in a module.

`named_parameters` of a module may leave out a part of the path, as that of torch's
`checkpoint_wrapper` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def placed_parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the path by which `get_parameter` finds it."""
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)
