"""How each kind of operation runs on pieces: which pieces it reads, and what its results are.

A rule gets the arguments of a call with a `Value` in the place of each tensor. What is cut already
comes with its cuts; anything else is there as a whole, so that any piece of it can be had. The rule
says which pieces the call reads, and of each result how it is cut, or that pieces add up to it. It
returns None where it knows no such way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rkgb.elements.op import Op, Ref
from rkgb.rows.cuts import Cuts, Shape, piece_shape, reshaped

_aten = torch.ops.aten
_TO_THE_END = 1 << 40


@dataclass(frozen=True)
class Value:
    """A tensor among the arguments, and how it is cut; None where it is there as a whole."""

    shape: Shape
    cuts: Cuts | None


@dataclass(frozen=True)
class Asked:
    """An operation with values in the places of its tensors, to be run in `count` pieces."""

    op: Op
    args: Sequence[Any]
    made: tuple[Shape, ...]  # shapes of the results
    count: int

    def cuts(self, place: int) -> Cuts:
        """Return how an argument is cut, which may be not at all."""
        value: Value = self.args[place]
        return value.cuts or (1,) * len(value.shape)

    def is_cut(self, place: int) -> bool:
        return isinstance(self.args[place], Value) and self.args[place].cuts is not None


@dataclass(frozen=True)
class Found:
    """How an operation runs on pieces."""

    reads: Mapping[int, Cuts]  # by the place of the argument; others are read as a whole
    results: tuple[Cuts | None, ...]  # None: the whole is the sum over pieces
    op: Op | None = None  # what is called in its place
    after: tuple[Op, ...] = field(default=())  # what makes results of sums, once these are there


Rule = Callable[[Asked], Found | None]


def find(asked: Asked) -> Found | None:
    """Return how an operation of which some argument is cut runs on pieces; None if no rule says.

    What a rule says fits together: what is cut already is read as it is cut, and piece i of one
    argument belongs to piece i of every other.
    """
    target = asked.op.target
    rule = _RULES.get(target)
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        rule = _elementwise
    found = None if rule is None or asked.op.kwargs.keys() & {"out"} else rule(asked)
    if found is None:
        return None
    for place, value in enumerate(asked.args):
        if isinstance(value, Value):
            read = found.reads.get(place, (1,) * len(value.shape))
            if value.cuts is not None and value.cuts != read:
                return None
            if math.prod(read) not in (1, asked.count) or any(map(_remains, value.shape, read)):
                return None
    cut = (c for c in found.results if c is not None)
    return found if all(math.prod(c) == asked.count for c in cut) else None


def _remains(size: int, parts: int) -> int:
    return size % parts


def _elementwise(asked: Asked) -> Found | None:
    """Every element by itself; dimensions are aligned at the end."""
    shape = asked.made[0]
    cuts = [1] * len(shape)
    for place, value in enumerate(asked.args):
        if isinstance(value, Value):
            for dim, parts in enumerate(reversed(asked.cuts(place))):
                if parts > 1 and cuts[-1 - dim] not in (1, parts):
                    return None
                cuts[-1 - dim] = max(parts, cuts[-1 - dim])
    reads = {}
    for place, value in enumerate(asked.args):
        if isinstance(value, Value):
            own = list(zip(reversed(value.shape), reversed(cuts), strict=False))
            reads[place] = tuple(1 if size == 1 else parts for size, parts in reversed(own))
    return Found(reads, (tuple(cuts),) * len(asked.made))


def _over(place_of_dim: int) -> Rule:
    """Like `_elementwise`, but for one dimension, which is read as a whole."""

    def rule(asked: Asked) -> Found | None:
        found = _elementwise(asked)
        dim = asked.args[place_of_dim]
        return None if found is None or found.results[0][dim] > 1 else found  # type: ignore[index]

    return rule


def _seen_as(asked: Asked) -> Found | None:
    cuts = reshaped(asked.args[0].shape, asked.cuts(0), asked.made[0])
    if cuts is None:
        return None
    # A piece may lie otherwise than the whole, so that no view is possible.
    size = list(piece_shape(asked.made[0], cuts))
    op = replace(asked.op, target=_aten.reshape.default, args=(asked.op.args[0], size))
    return Found({0: asked.cuts(0)}, (cuts,), op)


def _permuted(asked: Asked) -> Found | None:
    cuts, name = asked.cuts(0), asked.op.target_name
    dims = list(range(len(cuts)))
    if name == "t":
        dims.reverse()
    elif name == "transpose":
        a, b = asked.args[1:3]
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims = list(asked.args[1])
    return Found({0: cuts}, (tuple(cuts[dim] for dim in dims),))


def _unsqueezed(asked: Asked) -> Found | None:
    cuts = list(asked.cuts(0))
    cuts.insert(asked.args[1] % (len(cuts) + 1), 1)
    return Found({0: asked.cuts(0)}, (tuple(cuts),))


def _squeezed(asked: Asked) -> Found | None:
    cuts = list(asked.cuts(0))
    dim = asked.args[1] % len(cuts)
    if asked.args[0].shape[dim] != 1:
        return None
    del cuts[dim]
    return Found({0: asked.cuts(0)}, (tuple(cuts),))


def _expanded(asked: Asked) -> Found | None:
    cuts, made = asked.cuts(0), asked.made[0]
    found = (*(1,) * (len(made) - len(cuts)), *cuts)
    op = replace(asked.op, args=(asked.op.args[0], list(piece_shape(made, found))))
    return Found({0: cuts}, (found,), op)


def _sliced(asked: Asked) -> Found | None:
    """A slice along a dimension that is not cut, or of all of it."""
    cuts = asked.cuts(0)
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = [*asked.args[1:], *defaults[len(asked.args) - 1 :]]
    is_all = not start and (end is None or end > _TO_THE_END) and step == 1
    return Found({0: cuts}, (cuts,)) if cuts[dim] == 1 or is_all else None


def _product(asked: Asked) -> Found | None:
    """`mm` and `bmm`: along rows, along columns, or a sum over what is multiplied."""
    a, b = asked.cuts(0), asked.cuts(1)
    if asked.is_cut(0) and asked.is_cut(1):
        inner = a[-1] == b[-2] == asked.count
        if inner:
            return Found({0: a, 1: b}, (None,))
        batch = a == b and len(a) == 3 and a[0] == asked.count
        return Found({0: a, 1: b}, (a,)) if batch else None
    first = asked.is_cut(0)
    cuts, other = (a, (1,) * len(b)) if first else (b, (1,) * len(a))
    if len(cuts) == 3 and cuts[0] > 1:
        if cuts[1:] != (1, 1):
            return None
        return Found({0: cuts, 1: cuts}, (cuts,))
    row, column = cuts[-2:]
    if (column if first else row) > 1:  # of what is multiplied, both have these pieces
        there = (*other[:-2], column, 1) if first else (*other[:-2], 1, row)
        return Found({0: cuts, 1: there} if first else {0: there, 1: cuts}, (None,))
    return Found({0: cuts, 1: other} if first else {0: other, 1: cuts}, (cuts,))


def _product_and_sum(asked: Asked) -> Found | None:
    """`addmm`, `baddbmm`: a product of which no sums are cut, and a term that is spread over it."""
    found = _product(replace(asked, args=asked.args[1:3]))
    if found is None or found.results[0] is None:
        return None
    cuts, term = found.results[0], asked.args[0]
    pairs = list(zip(reversed(term.shape), reversed(cuts), strict=False))
    own = tuple(1 if size == 1 else parts for size, parts in reversed(pairs))
    return Found({0: own, 1: found.reads[0], 2: found.reads[1]}, (cuts,))


def _summed(asked: Asked) -> Found | None:
    """A sum over some dimensions, or all: of what is cut there, pieces add up."""
    cuts = asked.cuts(0)
    dims = asked.args[1] if len(asked.args) > 1 else ()
    over = {dim % len(cuts) for dim in dims or range(len(cuts))}
    if any(cuts[dim] > 1 for dim in over):
        return Found({0: cuts}, (None,))
    if len(asked.args) > 2 and asked.args[2]:
        return Found({0: cuts}, (cuts,))
    return Found({0: cuts}, (tuple(c for dim, c in enumerate(cuts) if dim not in over),))


def _averaged(asked: Asked) -> Found | None:
    """A mean over dimensions that are not cut, or over all there are: the mean of means."""
    found = _summed(asked)
    if found is None or found.results[0] is not None:
        return found
    return _divided(asked, found, asked.op, asked.count) if len(asked.args) == 1 else None


def _divided(asked: Asked, found: Found, op: Op, by: Any) -> Found:
    """Let the first result be the sum of what `op` makes in its place, divided by something."""
    result = op.results[0]
    summed = f"{result} of pieces"
    division = replace(
        asked.op,
        name=result,
        target=_aten.div.Tensor,
        args=(Ref(summed), by),
        kwargs={},
        results=(result,),
        returns_many=False,
    )
    op = replace(op, name=summed, results=(summed, *op.results[1:]))
    return replace(found, op=op, after=(division,))


def _normed(asked: Asked) -> Found | None:
    """Norms over the last dimensions: result and statistics by rows, in the forward."""
    cuts, count = asked.cuts(0), len(asked.args[1])
    if any(parts > 1 for parts in cuts[-count:]):
        return None
    return Found({0: cuts}, (cuts,) * len(asked.made))


def _normed_backward(asked: Asked) -> Found | None:
    """Gradients of what was normed by rows; those of weight and bias add up."""
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


def _loss(asked: Asked) -> Found | None:
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
    return _divided(asked, found, replace(asked.op, args=tuple(args)), Ref(asked.op.results[1]))


def _loss_backward(asked: Asked) -> Found | None:
    cut = next((asked.cuts(p) for p in (1,) if asked.is_cut(p)), None)
    if cut is None or len(cut) != 2 or cut[1] > 1:
        return None
    reads = {1: cut, 2: cut[:1], **({0: cut[:1]} if asked.args[4] == 0 else {})}
    return Found(reads, (cut,))


_RULES: Mapping[Any, Rule] = {
    _aten._to_copy.default: _elementwise,
    _aten.clone.default: _elementwise,
    _aten.detach.default: _elementwise,
    _aten.alias.default: _elementwise,
    _aten.zeros_like.default: _elementwise,
    _aten.ones_like.default: _elementwise,
    _aten.view.default: _seen_as,
    _aten._unsafe_view.default: _seen_as,
    _aten.t.default: _permuted,
    _aten.transpose.int: _permuted,
    _aten.permute.default: _permuted,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.squeeze.dim: _squeezed,
    _aten.expand.default: _expanded,
    _aten.slice.Tensor: _sliced,
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product_and_sum,
    _aten.baddbmm.default: _product_and_sum,
    _aten.sum.default: _summed,
    _aten.sum.dim_IntList: _summed,
    _aten.mean.default: _averaged,
    _aten.mean.dim: _averaged,
    _aten._softmax.default: _over(1),
    _aten._log_softmax.default: _over(1),
    _aten._softmax_backward_data.default: _over(2),
    _aten._log_softmax_backward_data.default: _over(2),
    _aten.native_layer_norm.default: _normed,
    _aten._fused_rms_norm.default: _normed,
    _aten.native_layer_norm_backward.default: _normed_backward,
    _aten._fused_rms_norm_backward.default: _normed_backward,
    _aten.nll_loss_forward.default: _loss,
    _aten.nll_loss_backward.default: _loss_backward,
}
