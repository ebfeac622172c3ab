"""Containers and objects among the arguments that a forward changes."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from rkgb.elements.effect import ContainerMutation
from rkgb.elements.sample import Sample
from rkgb.elements.trees import flatten, holds_tensors, refilled
from rkgb.errors import BrokenPieceError, NotRecordedError, SideEffectError
from rkgb.torch_api.tensor_facts import set_attribute, written_on

_PLAIN = (Tensor, type(None), bool, int, float, str, type, nn.Module)


class FilledArgumentError(BrokenPieceError, SideEffectError):
    """A forward puts tensors into an argument that held none; no opaque call can help."""


class Arguments:
    """The containers among the arguments of a call, and their content before it."""

    def __init__(self, sample: Sample) -> None:
        named: list[tuple[int | str, Any]] = [*enumerate(sample.args), *sample.kwargs.items()]
        own = [(place, value) for place, value in named if not isinstance(value, _PLAIN)]
        self._before = [(place, value, *flatten(value)) for place, value in own]
        tensors = {id(leaf): leaf for leaf in sample.leaves if isinstance(leaf, Tensor)}
        self._written = [(tensor, written_on(tensor)) for tensor in tensors.values()]
        # These are the user's own objects; a sample has copies of all that hold tensors.
        self._empty = [
            (leaf, _copy_of(leaf))
            for leaf in sample.leaves
            if not isinstance(leaf, _PLAIN) and hasattr(leaf, "__dict__")
        ]

    def refuse_written(self) -> None:
        """Refuse attributes of tensors that were set.

        Raises:
            NotRecordedError: with the name of one.
        """
        for tensor, before in self._written:
            name = set_attribute(before, written_on(tensor))
            if name is not None:
                raise NotRecordedError(
                    f"sets the attribute '{name}' of a tensor that it gets, which a planned step "
                    "would not do",
                    "return what is to be kept",
                )

    def refilled(self) -> list[tuple[ContainerMutation, Any]]:
        """Return the arguments with new content.

        Raises:
            FilledArgumentError: one held no tensors, and does now. It is restored.
        """
        for value, before in self._empty:
            if holds_tensors(value):
                refilled(value, before)
                raise FilledArgumentError(
                    f"the forward puts tensors into an argument, a {type(value).__name__} that "
                    "holds none before. Make it inside of forward, or let it hold some already; "
                    "models of transformers do without caches with use_cache=False."
                )
        found = []
        for place, value, leaves, structure in self._before:
            now, other = flatten(value)
            if other != structure or not all(map(_same, now, leaves)):
                found.append((ContainerMutation(place), value))
        return found


def _copy_of(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # without a copy nothing can be restored
        return value


def _same(a: Any, b: Any) -> bool:
    plain = isinstance(a, (bool, int, float, str)) and type(a) is type(b)
    return a is b or (plain and bool(a == b))
