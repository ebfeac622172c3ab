"""`with rockmate.plain():` runs planned modules without their plans."""

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
    """Run planned modules without their plans: forwards inside are plain PyTorch, without a budget.

    This is for steps that a plan cannot run, such as gradients of gradients. It affects only this
    thread. The backward of such a forward may run later.

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
    """Run planned modules plain, without hooks on saved tensors and global module hooks.

    Planning runs copies, which a checkpoint or a profiler around it must not see.
    """
    with plain(), without_saved_hooks(), without_global_hooks():
        yield


def is_plain() -> bool:
    """Return whether planned modules run plain in this thread."""
    return _depth.value > 0
