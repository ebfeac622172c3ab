"""Likely kinds of backwards, which are recorded in advance, while no step holds memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rkgb.elements import contiguous_strides
from rkgb.graphs import BackwardKind, BasicGraph
from rockmate.runtime.outputs import plain_strides

_FEW = 3  # up to here the backward of each single output is recorded in advance


def likely_kinds(basic: BasicGraph) -> list[BackwardKind]:
    """Return likely kinds besides gradients at all outputs: only the first loss gets a gradient.

    Without a loss: only one of the outputs; if there are many, only the first or the last.
    """
    roots = [place for place, strides in enumerate(basic.kind.tangents) if strides is not None]
    losses = [place for place in roots if not basic.infos[basic.roots[place]].shape]
    places = losses[:1] or (roots if len(roots) <= _FEW else [roots[0], roots[-1]])
    return [_alone(basic, place) for place in places if len(roots) > 1]


def kinds_of_sums(basic: BasicGraph) -> list[BackwardKind]:
    """Return the same kinds for gradients of a sum, whose strides are all 0, and of a mean.

    A mean gives contiguous ones, also to an output that is not contiguous.
    """
    places = [place for place, strides in enumerate(basic.kind.tangents) if strides is not None]
    alone = likely_kinds(basic) or [_alone(basic, place) for place in places]
    return [
        kind
        for one in alone
        for kind in (_given(basic, one, _expanded), _given(basic, one, contiguous_strides))
        if kind != one
    ]


def _given(
    basic: BasicGraph, kind: BackwardKind, strides: Callable[[Sequence[int]], tuple[int, ...]]
) -> BackwardKind:
    """Return the kind where gradients of the same outputs have strides by their shapes."""
    shapes = [basic.infos[name].shape for name in basic.roots]
    pairs = zip(shapes, kind.tangents, strict=True)
    return BackwardKind(
        tuple(plain_strides(s, None if t is None else strides(s)) for s, t in pairs), kind.autocast
    )


def _expanded(shape: Sequence[int]) -> tuple[int, ...]:
    return (0,) * len(shape)


def _alone(basic: BasicGraph, place: int) -> BackwardKind:
    """Return the kind of a backward from one output, with strides as in arriving gradients."""
    strides = [None if i != place else t for i, t in enumerate(basic.kind.tangents)]
    shapes = [basic.infos[name].shape for name in basic.roots]
    return BackwardKind(tuple(map(plain_strides, shapes, strides)), basic.kind.autocast)
