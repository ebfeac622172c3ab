"""The schema of a kernel, and how a call of it is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.op import BATCH_NORMS, Ref
from rkgb.errors import NotRecordedError
from rkgb.module_state.kept_writes import written_by

_aten = torch.ops.aten
# They read only shape, type and strides of their argument. They are recorded without it, so that it
# need not be alive: (constructor, positions of the remaining arguments).
_LIKE = {
    "empty_like": (_aten.empty_strided.default, False),
    "zeros_like": (_aten.zeros.default, False),
    "ones_like": (_aten.ones.default, False),
    "full_like": (_aten.full.default, True),
    "new_empty": (_aten.empty_strided.default, False),
    "new_empty_strided": (_aten.empty_strided.default, False),
    "new_zeros": (_aten.zeros.default, False),
    "new_ones": (_aten.ones.default, False),
    "new_full": (_aten.full.default, True),
}
# Their results have no content yet.
_BLANKS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# They return a view, which their schema does not say.
_VIEWS = frozenset(("_unsafe_view", "_reshape_alias"))
_DYNAMIC, _RANDOM = torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded
_RESHAPES = torch.Tag.inplace_view


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts from a kernel's schema, read once."""

    name: str
    is_foreign: bool  # from another library, whose kernel may be Python
    is_dynamic: bool  # sizes of results depend on values
    may_be_random: bool
    written: tuple[tuple[int, str], ...]  # arguments that it overwrites: position and name
    is_blank: bool  # its results have no content yet
    is_repeatable: bool  # it only returns new memory with content
    is_overwriting: bool  # it only changes the content of its first argument
    reads_nothing: bool  # it reads only shapes and strides, like a view
    like: tuple[Any, bool] | None

    def writes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the values that a call overwrites by its schema."""
        written: list[str] = []
        for position, name in self.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [v.name for v in values if isinstance(v, Ref)]
        return tuple(dict.fromkeys(written))


@functools.cache
def traits_of(func: Any) -> Traits:
    """Read the schema of a kernel."""
    tags, returns, written = frozenset(func.tags), func._schema.returns, written_by(func)
    name = str(func.__name__).split(".")[0]
    return Traits(
        name=name,
        is_foreign=func.namespace != "aten",
        is_dynamic=_DYNAMIC in tags,
        may_be_random=_RANDOM in tags or func.namespace != "aten",
        written=written,
        is_blank=name in _BLANKS,
        is_repeatable=func.namespace == "aten"
        and name not in (BATCH_NORMS | _BLANKS)
        and tags.isdisjoint((_RANDOM, _DYNAMIC))
        and all(result.alias_info is None for result in returns),
        is_overwriting=func.namespace == "aten"
        and name not in BATCH_NORMS
        and tags.isdisjoint((_RESHAPES, _DYNAMIC))
        and [place for place, _ in written] == [0]
        and len(returns) == 1,
        reads_nothing=func.namespace == "aten"
        and (
            name in (_BLANKS | _LIKE.keys() | _VIEWS)
            or (
                bool(returns)
                and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            )
        ),
        like=_LIKE.get(name) if func.namespace == "aten" else None,
    )


def without_generator(generator: torch.Generator) -> None:
    """Return None for torch's own generator.

    Raises:
        NotRecordedError: it is another generator.
    """
    here: Any = generator  # each call makes a new wrapper
    own: Any = (torch.default_generator, *torch.cuda.default_generators)
    if here._cdata not in [other._cdata for other in own]:
        raise NotRecordedError(
            "draws random numbers from a torch.Generator of its own, whose state a recording "
            "would not follow",
            "draw random numbers without a generator, from torch's",
        )


def without_shape_reads(
    func: Any,
    rule: tuple[Any, bool],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    made: Tensor,
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Return an equivalent call without the argument of which only the shape is read."""
    target, takes_value = rule
    strided = target is _aten.empty_strided.default
    if not strided and not made.is_contiguous():
        return func, args, kwargs
    new: tuple[Any, ...] = (list(made.shape),)
    if strided:
        new += (list(made.stride()),)
    if takes_value:
        new += (args[-1] if len(args) > 1 else kwargs["fill_value"],)
    return target, new, {"dtype": made.dtype, "device": made.device}


def tensors_returned(result: Any) -> tuple[list[Tensor | None] | None, bool]:
    """Return (tensors of a result, or None for other types; whether it is a tuple or list)."""
    if isinstance(result, Tensor):
        return [result], False
    if result is None:
        return [], False
    if isinstance(result, (tuple, list)) and all(
        isinstance(t, Tensor) or t is None for t in result
    ):
        return list(result), True
    # Kernels of attention also return sizes, which are passed to their backward.
    several = isinstance(result, tuple) and len(result) > 1 and isinstance(result[0], Tensor)
    if several and all(isinstance(t, (Tensor, int, type(None))) for t in result):
        return [t if isinstance(t, Tensor) else None for t in result], True
    return None, False
