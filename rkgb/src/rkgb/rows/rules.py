"""How each kind of operation runs on pieces: which pieces it reads, and what its results are.

A rule gets the arguments of a call with a `Value` in the place of each tensor. A cut tensor comes
with its cuts; any other exists as a whole, and the rule may ask for any piece of it. The rule says
which pieces the call reads. It says of each result how it is cut, or that its pieces add up. It
returns None if the operation cannot run on these pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rkgb.elements.op import Op, Ref
from rkgb.rows.cuts import EVEN, Cuts, Runs, Shape, piece_shape, reshaped

_aten = torch.ops.aten
_TO_THE_END = 1 << 40


@dataclass(frozen=True)
class Value:
    """A tensor among the arguments, and its cuts; None if it exists as a whole."""

    shape: Shape
    cuts: Cuts | None


@dataclass(frozen=True)
class Asked:
    """An operation with a `Value` for each tensor, to be run in `count` pieces.

    The operation in answers is that of one piece (`index`), which may be a shorter one.
    """

    op: Op
    args: Sequence[Any]
    made: tuple[Shape, ...]  # shapes of the results
    count: int
    runs: Runs = EVEN
    index: int = 0

    def cuts(self, place: int) -> Cuts:
        """Return the cuts of an argument; ones for a whole value."""
        value: Value = self.args[place]
        return value.cuts or (1,) * len(value.shape)

    def is_cut(self, place: int) -> bool:
        return isinstance(self.args[place], Value) and self.args[place].cuts is not None

    def piece_shape(self, shape: Sequence[int], cuts: Cuts) -> Shape:
        return piece_shape(shape, cuts, self.runs, self.index)


@dataclass(frozen=True)
class Found:
    """How an operation runs on pieces."""

    reads: Mapping[int, Cuts]  # by position of the argument; others are read as a whole
    results: tuple[Cuts | None, ...]  # None: the result is the sum over pieces
    op: Op | None = None  # the operation that runs in its place
    after: tuple[Op, ...] = field(default=())  # operations that make results of the sums


Rule = Callable[[Asked], Found | None]


def elementwise(asked: Asked) -> Found | None:
    """Elementwise operations; dimensions are aligned at the end."""
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


def over(place_of_dim: int) -> Rule:
    """Like `elementwise`, except for one dimension, which is read as a whole."""

    def rule(asked: Asked) -> Found | None:
        found = elementwise(asked)
        dim = asked.args[place_of_dim]
        return None if found is None or found.results[0][dim] > 1 else found  # type: ignore[index]

    return rule


def seen_as(asked: Asked) -> Found | None:
    cuts = reshaped(asked.args[0].shape, asked.cuts(0), asked.made[0], asked.runs)
    if cuts is None:
        return None
    # The strides of a piece may not allow a view although those of the whole do.
    size = list(asked.piece_shape(asked.made[0], cuts))
    op = replace(asked.op, target=_aten.reshape.default, args=(asked.op.args[0], size))
    return Found({0: asked.cuts(0)}, (cuts,), op)


def permuted(asked: Asked) -> Found | None:
    cuts, name = asked.cuts(0), asked.op.target_name
    dims = list(range(len(cuts)))
    if name == "t":
        dims.reverse()
    elif name == "transpose":
        a, b = asked.args[1:3]
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims = list(asked.args[1])
    cut = [dim % len(cuts) for dim in dims if cuts[dim] > 1]
    if cut != sorted(cut):  # pieces would come in another order
        return None
    return Found({0: cuts}, (tuple(cuts[dim] for dim in dims),))


def unsqueezed(place_of_dim: int) -> Rule:
    """One more dimension: of `unsqueeze`, and of the backward of `select`."""

    def rule(asked: Asked) -> Found | None:
        cuts = list(asked.cuts(0))
        cuts.insert(asked.args[place_of_dim] % (len(cuts) + 1), 1)
        return Found({0: asked.cuts(0)}, (tuple(cuts),))

    return rule


def squeezed(asked: Asked) -> Found | None:
    cuts = list(asked.cuts(0))
    dim = asked.args[1] % len(cuts)
    if asked.args[0].shape[dim] != 1:
        return None
    del cuts[dim]
    return Found({0: asked.cuts(0)}, (tuple(cuts),))


def with_size(rule: Rule, place: int) -> Rule:
    """Like `rule`, for operations with an argument for the result's size or number of samples."""

    def found(asked: Asked) -> Found | None:
        there, size = rule(asked), asked.args[place]
        if there is None or there.results[0] is None:
            return None
        args = list(asked.op.args)
        is_number = isinstance(size, int)
        whole = (size,) if is_number else asked.made[0]
        fewer = list(asked.piece_shape(whole, there.results[0][: len(whole)]))
        args[place] = fewer[0] if is_number else fewer
        return replace(there, op=replace(asked.op, args=tuple(args)))

    return found


def expanded(asked: Asked) -> Found | None:
    cuts = asked.cuts(0)
    return Found({0: cuts}, ((*(1,) * (len(asked.made[0]) - len(cuts)), *cuts),))


def parted(asked: Asked) -> Found | None:
    """`split` along a dimension that is not cut."""
    cuts, dim = asked.cuts(0), asked.args[2] if len(asked.args) > 2 else 0
    return Found({0: cuts}, (cuts,) * len(asked.made)) if cuts[dim] == 1 else None


def joined(asked: Asked) -> Found | None:
    """`cat` along a dimension that is not cut; here the tensors are separate arguments."""
    values = {p: v for p, v in enumerate(asked.args) if isinstance(v, Value)}
    dim = asked.args[-1] if len(values) < len(asked.args) else 0
    cuts = next(asked.cuts(place) for place in values if asked.is_cut(place))
    if cuts[dim] > 1 or any(len(v.shape) != len(cuts) for v in values.values()):
        return None
    return Found(dict.fromkeys(values, cuts), (cuts,))


def scattered(asked: Asked) -> Found | None:
    """`scatter_add` along a dimension that is not cut, with numbers for each of the others."""
    places = (0, 2, 3)
    cuts = next(asked.cuts(place) for place in places if asked.is_cut(place))
    shape, dim = asked.made[0], asked.args[1]
    if cuts[dim] > 1:
        return None
    cut = [at for at, parts in enumerate(cuts) if parts > 1]
    if any(asked.args[place].shape[at] != shape[at] for place in places for at in cut):
        return None
    return Found(dict.fromkeys(places, cuts), (cuts,))


def selected(asked: Asked) -> Found | None:
    """`select` and `unbind` of a dimension that is not cut."""
    cuts = list(asked.cuts(0))
    is_whole = cuts.pop(asked.args[1] if len(asked.args) > 1 else 0) == 1
    return Found({0: asked.cuts(0)}, (tuple(cuts),) * len(asked.made)) if is_whole else None


def sliced_backward(asked: Asked) -> Found | None:
    cuts = asked.cuts(0)
    return Found({0: cuts}, (cuts,)) if cuts[asked.args[2]] == 1 else None


def sliced(asked: Asked) -> Found | None:
    """A slice along a dimension that is not cut, or of all of it."""
    cuts = asked.cuts(0)
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = [*asked.args[1:], *defaults[len(asked.args) - 1 :]]
    is_all = not start and (end is None or end > _TO_THE_END) and step == 1
    return Found({0: cuts}, (cuts,)) if cuts[dim] == 1 or is_all else None


def product(asked: Asked) -> Found | None:
    """`mm` and `bmm`: cut along rows, along columns, or along the contracted dimension (a sum)."""
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
    if (column if first else row) > 1:  # the contracted dimension: both are cut
        there = (*other[:-2], column, 1) if first else (*other[:-2], 1, row)
        return Found({0: cuts, 1: there} if first else {0: there, 1: cuts}, (None,))
    return Found({0: cuts, 1: other} if first else {0: other, 1: cuts}, (cuts,))


def product_and_sum(asked: Asked) -> Found | None:
    """`addmm`, `baddbmm`: a product that is no sum over pieces, and a broadcast term."""
    found = product(replace(asked, args=asked.args[1:3]))
    if found is None or found.results[0] is None:
        return None
    cuts, term = found.results[0], asked.args[0]
    pairs = list(zip(reversed(term.shape), reversed(cuts), strict=False))
    own = tuple(1 if size == 1 else parts for size, parts in reversed(pairs))
    return Found({0: own, 1: found.reads[0], 2: found.reads[1]}, (cuts,))


def summed(asked: Asked) -> Found | None:
    """A sum over some or all dimensions; if one of them is cut, pieces add up."""
    cuts = asked.cuts(0)
    dims = asked.args[1] if len(asked.args) > 1 else ()
    over = {dim % len(cuts) for dim in dims or range(len(cuts))}
    if any(cuts[dim] > 1 for dim in over):
        return Found({0: cuts}, (None,))
    if len(asked.args) > 2 and asked.args[2]:
        return Found({0: cuts}, (cuts,))
    return Found({0: cuts}, (tuple(c for dim, c in enumerate(cuts) if dim not in over),))


def averaged(asked: Asked) -> Found | None:
    """A mean over dimensions that are not cut, or over all: then a sum that is divided."""
    found = summed(asked)
    if found is None or found.results[0] is not None:
        return found
    op = replace(asked.op, target=_aten.sum.default)
    number = math.prod(asked.args[0].shape)
    return divided(asked, found, op, number) if len(asked.args) == 1 else None


def divided(asked: Asked, found: Found, op: Op, by: Any) -> Found:
    """Return `found` with the first result made by `op`, summed over pieces and divided by `by`."""
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
