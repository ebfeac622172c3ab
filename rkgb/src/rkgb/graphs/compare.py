"""Whether two recordings are one program, apart from scalars of arithmetic, or from sizes.

If only a temperature, a probability or a step size differs, the recordings have the same operations
on the same sizes. So they have the same costs, and the same plan serves both. If only the length of
a batch differs, they have the same operations on other sizes. So costs differ, and a schedule of
one is a schedule of the other.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rkgb.elements.numbers import is_unspecialised
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import Target, target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph

_STRUCTURE = (
    *("hand_overs", "parameters", "buffers", "output_names", "roots"),
    *("tangent_names", "device", "model_name", "opaque", "effects", "flows"),
)
# Facts about a tensor that do not depend on its size.
_UNSIZED = operator.attrgetter("dtype", "alias_of", "requires_grad", "is_on_host", "is_conj")
_Values = Callable[[Any, Any, bool], bool]  # two arguments, and whether they are scalars


def same_but_for_numbers(a: BasicGraph, b: BasicGraph) -> bool:
    """Return whether two recordings differ only in scalar arguments of operations."""
    return a.infos == b.infos and a.kind == b.kind and _same_program(a, b, _same_value)


def same_but_for_sizes(a: BasicGraph, b: BasicGraph) -> bool:
    """Return whether two recordings differ only in numbers, shapes and strides."""
    if a.infos.keys() != b.infos.keys() or a.kind.autocast != b.kind.autocast:
        return False
    pairs = zip(a.infos.values(), b.infos.values(), strict=True)
    return all(_of_one_rank(x, y) for x, y in pairs) and _same_program(a, b, _same_but_for_size)


def _same_program(a: BasicGraph, b: BasicGraph, same: _Values) -> bool:
    if any(_of_steps(getattr(a, name)) != _of_steps(getattr(b, name)) for name in _STRUCTURE):
        return False
    if _without_numbers_at_the_end(a.inputs) != _without_numbers_at_the_end(b.inputs):
        return False
    return (
        list(a.constants) == list(b.constants)
        and len(a.outputs) == len(b.outputs)
        and all(_same_operations(x, y, same) for x, y in ((a.ops, b.ops), (a.backward, b.backward)))
    )


def _of_one_rank(a: TensorInfo, b: TensorInfo) -> bool:
    return len(a.shape) == len(b.shape) and _UNSIZED(a) == _UNSIZED(b)


def _of_steps(value: Any) -> Any:
    """Return hand-overs without autograd's sequence numbers, which differ from step to step."""
    if isinstance(value, tuple) and value and hasattr(value[0], "leaf"):
        return tuple((h.leaf, h.value) for h in value)
    return value


def _without_numbers_at_the_end(inputs: Sequence[str | None]) -> tuple[str | None, ...]:
    """Return the inputs up to the last tensor; numbers that are attributes may follow it."""
    count = max((place for place, name in enumerate(inputs, 1) if name is not None), default=0)
    return tuple(inputs[:count])


def _same_operations(first: Sequence[Op], second: Sequence[Op], same: _Values) -> bool:
    return len(first) == len(second) and all(
        _same_operation(a, b, same) for a, b in zip(first, second, strict=True)
    )


def _same_operation(a: Op, b: Op, same: _Values) -> bool:
    if (
        not _same_target(a.target, b.target)
        or len(a.args) != len(b.args)
        or list(a.kwargs) != list(b.kwargs)
    ):
        return False
    ours, theirs = ((x.name, x.results, x.writes, x.is_random, x.flags) for x in (a, b))
    if ours != theirs:
        return False
    order, scalars = _scalars_of(a.target)
    is_whole = target_of(a).whole is not None
    pairs = [
        (order[i] if i < len(order) else "", x, y)
        for i, (x, y) in enumerate(zip(a.args, b.args, strict=True))
    ]
    pairs += [(name, a.kwargs[name], b.kwargs[name]) for name in a.kwargs]
    return all(same(x, y, is_whole or name in scalars) for name, x, y in pairs)


def _same_target(a: Any, b: Any) -> bool:
    return a is b or a == b or (isinstance(a, Target) and a.costs_as(b))


_SCALARS = ("number", "Optional[number]", "Tensor")


@functools.lru_cache(maxsize=4096)
def _scalars_of(target: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of an operation's arguments, and of those in which a number is a scalar.

    `mul.Tensor` accepts a number in place of a tensor.
    """
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    names = tuple(argument.name for argument in arguments)
    return names, frozenset(x.name for x in arguments if str(x.type) in _SCALARS)


def _kind(value: Any) -> type:
    kind = type(value)
    return value.kind if is_unspecialised(value) else kind


def _same_value(a: Any, b: Any, is_scalar: bool, *, any_int: bool = False) -> bool:
    kind = _kind(a)
    if kind is not _kind(b):
        return False
    if kind is float or (kind is int and (is_scalar or any_int)):
        return True
    if kind in (list, tuple):
        same = functools.partial(_same_value, is_scalar=False, any_int=any_int)
        return len(a) == len(b) and all(map(same, a, b))
    if kind is Ref:
        return bool(a.name == b.name)
    return a is b or bool(a == b)


_same_but_for_size = functools.partial(_same_value, any_int=True)
