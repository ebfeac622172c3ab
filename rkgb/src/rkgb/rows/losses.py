"""Losses whose gradients are made along with them, piece by piece.

The backward of a loss begins with one number, and all gradients are in proportion to it. So the
pieces of the forward also make the gradients of a loss whose own gradient is one, and the backward
scales them. No piece runs twice. What a mean over targets divides by depends on the targets alone,
so it is counted before the pieces. The gradient of logits is made out of probabilities in the
memory of the logits, so that no second value of that size is there.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref, map_refs
from rkgb.elements.target import Target
from rkgb.elements.tensor_info import TensorInfo, contiguous_strides
from rkgb.errors import NotByPiecesError
from rkgb.rows.cuts import Shape

_aten = torch.ops.aten
_OWN = 2  # references to an object that only one name holds, while they are counted
_SUMMED_OVER = _MEAN, _ = (1, 2)  # reductions of a loss: mean, sum
_ROWS, _CLASSES = 0, 1  # dimensions
_IGNORED = -100  # no class


class Scaled(Target):
    """Gradients of a loss whose gradient is one, times the gradient that has come.

    They stay in their memory where they are donated (`frees`) and nobody else holds them.
    """

    def __init__(self, frees: frozenset[int] = frozenset()) -> None:
        self.__name__ = "scaled"
        self.frees = frees

    def __repr__(self) -> str:  # the same in every process: a key of recorded costs
        return f"scaled{sorted(self.frees)}"

    def run(self, boxed: list[Any]) -> Sequence[Tensor]:
        made = []
        while len(boxed) > 1:
            at, unit = len(boxed) - 1, boxed.pop()
            by = boxed[0].to(unit.dtype)
            # A checkpoint around the module, which may give it again, holds the same object.
            is_own = sys.getrefcount(unit) <= _OWN and unit._use_count() == 1
            may_write = at in self.frees and is_own
            made.append(unit.mul_(by) if may_write else unit * by)
            del unit
        boxed.clear()
        made.reverse()
        return made

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.run(list(tensors))

    def freeing(self, places: frozenset[int], own: frozenset[int]) -> Scaled:
        return Scaled(places)

    def flops(self, count: Callable[[Op], int]) -> int:
        return 0

    def inner_bytes(self, like: Sequence[Any]) -> int:
        copied = (tensor for at, tensor in enumerate(like) if at and at not in self.frees)
        return sum(tensor.untyped_storage().nbytes() for tensor in copied)


def one_like(tangent: str, like: str, dtype: torch.dtype) -> Op:
    """Return the operation that makes a gradient of one; `like` is a tensor of the device."""
    return _op(_aten.new_ones.default, (Ref(like), []), f"{tangent} of one", dtype=dtype)


def counted(ops: Sequence[Op], infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, list[Op]]]:
    """Yield the divisors of means over targets, each with the operations that count it alone."""
    maker = {name: op for op in ops for name in op.results if name}
    for op in ops:
        if op.target is not _aten.nll_loss_forward.default or op.args[3] not in _SUMMED_OVER:
            continue
        targets, weights, ignored, total = op.args[1], op.args[2], op.args[4], op.results[1]
        if weights is not None or not total:
            continue
        found: list[Op] = []
        whole = _as_a_whole(targets.name, maker, found)
        is_asked = _op(_aten.ne.Scalar, (Ref(whole), ignored), f"{total} each")
        number = _op(_aten.sum.default, (Ref(is_asked.name),), f"{total} as an integer")
        dtype = infos[total].dtype
        last = _op(_aten._to_copy.default, (Ref(number.name),), f"{total} before", dtype=dtype)
        yield total, [*found, is_asked, number, last]


def direct(
    ops: Sequence[Op], infos: Mapping[str, TensorInfo], left: Collection[str]
) -> tuple[list[Op], dict[str, TensorInfo]]:
    """Return operations in which logits' gradients are made out of probabilities, in their place.

    The kernels of a loss and of log_softmax make one with the size of the logits each. Per row that
    counts, the gradient is its share times the probabilities less one for the target.
    """
    maker = {name: op for op in ops for name in op.results if name}
    readers = Counter(name for op in ops for name in op.inputs)
    found: list[Op] = []
    added: dict[str, TensorInfo] = {}
    for op in ops:
        is_softmax = op.target is _aten._log_softmax_backward_data.default
        loss = maker.get(op.inputs[0]) if is_softmax else None
        shared = loss is None or readers[loss.name] > 1 or loss.name in left
        if loss is None or shared or not _is_direct(op, loss, infos):
            found.append(op)
            continue
        found.remove(loss)
        tangent, values, targets, _, reduction, ignored, total = loss.args
        name = op.name

        def add(
            what: str, target: Any, *args: Any, dtype: torch.dtype, shape: Shape, name: str = name
        ) -> Ref:
            made = f"{name}: {what}" if what else name
            size = math.prod(shape) * dtype.itemsize
            stride = contiguous_strides(shape)
            added[made] = TensorInfo(shape, dtype, stride, False, made, size, size)
            found.append(_op(target, args, made))
            return Ref(made)

        shape, index = infos[name].shape, infos[targets.name].dtype
        number, rows, column = infos[name].dtype, shape[:1], (shape[_ROWS], 1)
        each = tangent
        if reduction == _MEAN:
            each = add("of a row", _aten.div.Tensor, tangent, total, dtype=number, shape=())
        zero = add("zero", _aten.zeros_like.default, each, dtype=number, shape=())
        out = add("ignored", _aten.eq.Scalar, targets, ignored, dtype=torch.bool, shape=rows)
        share = add("shares", _aten.where.self, out, zero, each, dtype=number, shape=rows)
        share = add("column", _aten.unsqueeze.default, share, 1, dtype=number, shape=column)
        place = add("any", _aten.masked_fill.Scalar, targets, out, 0, dtype=index, shape=rows)
        place = add("places", _aten.unsqueeze.default, place, 1, dtype=index, shape=column)
        less = add("less", _aten.neg.default, share, dtype=number, shape=column)
        made = add("probabilities", _aten.exp.default, values, dtype=number, shape=shape)
        made = add("scaled", _aten.mul.Tensor, made, share, dtype=number, shape=shape)
        add("", _aten.scatter_add.default, made, 1, place, less, dtype=number, shape=shape)
    return found, added


def _is_direct(op: Op, loss: Op, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether a gradient of log_softmax is that of the mean or sum of a loss of rows."""
    if loss.target is not _aten.nll_loss_backward.default or op.inputs[1] != loss.args[1].name:
        return False
    values, made = infos[op.inputs[1]], infos[op.name]
    is_plain = values.dtype == made.dtype and values.stride == made.stride == (values.shape[-1], 1)
    return is_plain and loss.args[3] is None and loss.args[4] in _SUMMED_OVER


def of_rows(op: Op, infos: Mapping[str, TensorInfo]) -> tuple[Op, Sequence[Op], TensorInfo] | None:
    """Return a loss as losses of rows, what adds these up, and the facts about them.

    The sum is made by the same kernel in the same order, of one class that has all of them: so it
    has the bits of the whole, and nothing but a number for each row has to be there as a whole.
    """
    if op.target is not _aten.nll_loss_forward.default or op.args[3] not in _SUMMED_OVER:
        return None
    values, targets, weights, reduction, ignored = op.args
    info = infos[values.name]
    if weights is not None or len(info.shape) != len((_ROWS, _CLASSES)):
        return None
    rows, size = info.shape[_ROWS], info.size_bytes // max(info.shape[_CLASSES], 1)
    each, zero, out = (f"{op.name} {what}" for what in ("of rows", "zeros", "ignored"))
    facts = replace(
        info,
        shape=(rows,),
        stride=(1,),
        offset=0,
        alias_of=each,
        size_bytes=size,
        storage_bytes=size,
    )
    first = replace(op, name=each, args=(values, targets, None, 0, ignored), results=(each, ""))
    summed = (
        _op(_aten.neg.default, (Ref(each),), f"{each}, negative"),
        _op(_aten.unsqueeze.default, (Ref(f"{each}, negative"), _CLASSES), f"{each}, as one class"),
        _op(_aten.zeros_like.default, (targets,), zero),
        _op(_aten.eq.Scalar, (targets, ignored), out),
        _op(_aten.masked_fill.Scalar, (Ref(zero), Ref(out), _IGNORED), f"{op.name} targets"),
        replace(
            op,
            args=(
                *(Ref(f"{each}, as one class"), Ref(f"{op.name} targets")),
                *(None, reduction, _IGNORED),
            ),
        ),
    )
    return first, summed, facts


def _as_a_whole(name: str, maker: Mapping[str, Op], found: list[Op]) -> str:
    """Return a value that operations outside of the pieces make, and add these operations."""
    op = maker.get(name)
    if op is None:
        return name
    if op.is_random or op.writes:
        raise NotByPiecesError(f"{op.target_name} makes the targets")
    own = {n: _as_a_whole(n, maker, found) for n in op.inputs}
    results = tuple(f"{n} as a whole" if n else n for n in op.results)
    args = map_refs(op.args, lambda n: Ref(own[n]))
    if all(made.results != results for made in found):
        found.append(replace(op, name=results[0], args=args, results=results))
    return f"{name} as a whole"


def _op(target: Any, args: tuple[Any, ...], result: str, **options: Any) -> Op:
    return Op(name=result, target=target, args=args, kwargs=options, results=(result,))
