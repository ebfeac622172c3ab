"""Rules of layers: norms, losses, convolutions, pooling, embeddings, attention."""

from __future__ import annotations

from dataclasses import replace

from rkgb.elements.op import Ref
from rkgb.rows.rules import Asked, Found, Rule, Value, divided


def samples(places: tuple[int, ...], made: str, *, dims: int = 1) -> Rule:
    """Return the rule for independent samples: these arguments have the same cuts of rows.

    `made` has a letter for each result: "r" is cut in rows, "s" is a sum over pieces.
    """

    def rule(asked: Asked) -> Found | None:
        values = {p: asked.args[p] for p in places if isinstance(asked.args[p], Value)}
        first = next((asked.cuts(p)[:dims] for p in values if asked.is_cut(p)), None)
        if first is None:
            return None
        reads = {p: (*first, *(1,) * (len(v.shape) - dims)) for p, v in values.items()}
        rows = (first + (1,) * (len(shape) - dims) for shape in asked.made)
        return Found(reads, tuple(r if m == "r" else None for r, m in zip(rows, made, strict=True)))

    return rule


def looked_up(asked: Asked) -> Found | None:
    """`embedding`: indices are cut in rows, the table is whole."""
    return Found({1: asked.cuts(1)}, ((*asked.cuts(1), 1),))


def looked_up_backward(asked: Asked) -> Found | None:
    """The gradient of a table is a sum, unless it is scaled by counts over all rows."""
    rows = asked.cuts(1) if asked.is_cut(1) else asked.cuts(0)[:-1]
    return None if asked.args[4] else Found({0: (*rows, 1), 1: rows}, (None,))


def normed(asked: Asked) -> Found | None:
    """The forward of norms over the last dimensions: result and statistics are cut by rows."""
    cuts, count = asked.cuts(0), len(asked.args[1])
    if any(parts > 1 for parts in cuts[-count:]):
        return None
    return Found({0: cuts}, (cuts,) * len(asked.made))


def normed_backward(asked: Asked) -> Found | None:
    """The backward of norms: the input's gradient is cut by rows; weight and bias are sums."""
    rows = [place for place, value in enumerate(asked.args) if isinstance(value, Value)]
    rows = [place for place in rows if len(asked.args[place].shape) == len(asked.args[0].shape)]
    cut = next(asked.cuts(place) for place in rows if asked.is_cut(place))
    last = len(asked.args[2])
    whole = {place for place, v in enumerate(asked.args) if isinstance(v, Value)} - {*rows}
    if any(parts > 1 for parts in cut[-last:]) or any(map(asked.is_cut, whole)):
        return None
    if len(cut) == last:
        return None
    return Found(dict.fromkeys(rows, cut), (cut, *(None,) * (len(asked.op.results) - 1)))


def loss(asked: Asked) -> Found | None:
    """`nll_loss_forward` of rows of classes."""
    cut = asked.cuts(0) if asked.is_cut(0) else (*(asked.cuts(1)), 1)
    if len(cut) != 2 or cut[1] > 1:
        return None
    reads = {0: cut, 1: cut[:1]}
    reduction = asked.args[3]
    if reduction == 0:
        return Found(reads, (cut[:1], None))
    found = Found(reads, (None, None))
    if reduction == 2:
        return found
    args = list(asked.op.args)
    args[3] = 2
    return divided(asked, found, replace(asked.op, args=tuple(args)), Ref(asked.op.results[1]))


def loss_backward(asked: Asked) -> Found | None:
    cut = next((asked.cuts(p) for p in (1,) if asked.is_cut(p)), None)
    if cut is None or len(cut) != 2 or cut[1] > 1:
        return None
    reads = {1: cut, 2: cut[:1], **({0: cut[:1]} if asked.args[4] == 0 else {})}
    return Found(reads, (cut,))
