"""`with rockmate.plain():` planned modules run as the plain ones that they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rkgb.torch_api import without_global_hooks, without_saved_hooks


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Run planned modules without their plans: forwards in here are plain PyTorch's, unbounded.

    For what a plan cannot serve, such as gradients of gradients. It holds in this thread; the
    backward of such a forward may come later.

    Examples:
        >>> with rockmate.plain():
        ...     y = rk(x)
        >>> (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # a gradient penalty
        >>> g.square().sum().backward()
    """
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Run planned modules plain, out of sight of hooks that see what is saved or every module.

    Planning runs copies: a checkpoint or a profiler around it has not asked for them.
    """
    with plain(), without_saved_hooks(), without_global_hooks():
        yield


def is_plain() -> bool:
    """Whether planned modules run plain in this thread."""
    return _depth.value > 0
