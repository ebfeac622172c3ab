"""The gradients of an opaque call: their parts, each in separate memory, and their sums."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rkgb.elements.spread import memory_of
from rkgb.graphs.basic import autocast_as
from rkgb.opaque.inner_graph import InnerGraph
from rkgb.torch_api.private.autograd import back_to_autograd, firing_order


def apart(tensor: Tensor, taken: list[tuple[int, int]]) -> Tensor:
    """Return a gradient in separate memory, because it may be written while others are read.

    Addresses are compared instead of storages: once Python has accessed the storage of a gradient,
    autograd no longer adds to it in place.
    """
    start, end = span(tensor)
    if any(start < other_end and other_start < end for other_start, other_end in taken):
        tensor = tensor.clone()
    taken.append(span(tensor))
    return tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the range of addresses of a tensor's elements; of a sparse one, of its values."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    tensor = memory_of(tensor)
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def gradients_of(
    inner: InnerGraph,
    given: dict[tuple[str, int], Tensor],
    grads: list[Tensor | None],
    frees: Collection[int] = (),
    kept: set[tuple[int, int]] | None = None,
) -> list[list[Tensor]]:
    """Return the parts of each gradient, in separate memory; `grads` is emptied.

    The program does not hold the gradients at the positions `frees`, but the user may. Where those
    lie that hooks keep, and parts that they keep, is added to `kept`.
    """
    came = [t for t in grads if t is not None]
    arrived = [(span(t), at in frees, weakref.ref(t)) for at, t in enumerate(came)]
    del came
    with back_to_autograd(), torch.no_grad(), autocast_as(None):
        parts = inner.backward(given, grads)
    # A freed gradient's address may belong to a newer gradient.
    taken = [place for place, freed, tensor in arrived if not freed or tensor() is not None]
    taken += [span(t) for t in given.values()]
    made: list[list[Tensor]] = []
    for own in parts:
        made.append([])
        while own:
            part = own.pop(0)
            # A view keeps its base alive, and autograd then cannot add to it in place.
            held, alone = weakref.ref(part), part.detach()
            del part
            if held() is not None:  # a hook has kept it, and autograd may add to what it gets
                taken.append(span(alone))
                if kept is not None:
                    kept.add(taken[-1])
            made[-1].append(apart(alone, taken))
    if kept is not None:
        kept.update(place for place, freed, tensor in arrived if freed and tensor() is not None)
    return made


def added(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts of a gradient one by one, as autograd does when they arrive."""
    return functools.reduce(operator.add, parts)


def laid(gradient: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a gradient of the same content with these strides, if any are given."""
    if strides is None or gradient.layout is not torch.strided:
        return gradient
    last = sum((size - 1) * step for size, step in zip(gradient.shape, strides, strict=True))
    memory = torch.full((last + 1,), 0.5, dtype=gradient.dtype, device=gradient.device)
    return memory.as_strided(gradient.shape, strides)


def as_visited(groups: Sequence[tuple[int, ...]], inputs: int) -> tuple[int, ...]:
    """Return the ends that nodes gave gradients to, in the order of plain PyTorch's hooks.

    The engine visits leaves whose gradients are complete by the order of its heap. The first
    `inputs` ends are arguments, which others have made: their nodes come later.
    """
    last = {place: number for number, group in enumerate(groups) for place in group}
    found: list[int] = []
    for number, group in enumerate(groups):
        done = [p for p in dict.fromkeys(group) if last[p] == number and p >= inputs]
        found += (place for place in group if place not in done)
        alone = number + 1 == len(groups) and min(group, default=inputs) >= inputs
        found += (done[k] for k in firing_order(len(done), "nothing" if alone else "node"))
    return tuple(found)
