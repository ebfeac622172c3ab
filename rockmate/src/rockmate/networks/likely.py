"""Likely kinds of backwards, which are recorded in advance, while no step holds memory."""

from __future__ import annotations

from rkgb.graphs import BackwardKind, BasicGraph
from rockmate.runtime.executable import plain_strides

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
    """Return the same kinds for gradients of a sum or a mean, whose strides are all 0."""
    places = [place for place, strides in enumerate(basic.kind.tangents) if strides is not None]
    alone = likely_kinds(basic) or [_alone(basic, place) for place in places]
    strides = ([None if t is None else (0,) * len(t) for t in kind.tangents] for kind in alone)
    return [BackwardKind(tuple(found), basic.kind.autocast) for found in strides]


def _alone(basic: BasicGraph, place: int) -> BackwardKind:
    """Return the kind of a backward from one output, with strides as in arriving gradients."""
    strides = [None if i != place else t for i, t in enumerate(basic.kind.tangents)]
    shapes = [basic.infos[name].shape for name in basic.roots]
    return BackwardKind(tuple(map(plain_strides, shapes, strides)), basic.kind.autocast)
