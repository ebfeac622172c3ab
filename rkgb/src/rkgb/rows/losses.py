"""Losses whose gradients are made along with them, piece by piece.

The backward of a loss begins with one number, and all gradients are in proportion to it. So the
pieces of the forward also make the gradients of a loss whose own gradient is one, and the backward
scales them. No piece runs twice. What a mean over targets divides by depends on the targets alone,
so it is counted before the pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref, map_refs
from rkgb.elements.target import Target
from rkgb.elements.tensor_info import TensorInfo
from rkgb.errors import NotByPiecesError

_aten = torch.ops.aten
_OWN = 2  # references to an object that only one name holds, while they are counted
_SUMMED_OVER = (1, 2)  # reductions of a loss: mean, sum
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
