"""What a plan takes for granted about the inputs of a call, checked at every call.

A recording freezes shapes, strides and Python values. When one of them differs at a call, running
the program would silently compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rkgb.engine import ambient_autocast
from rockmate.errors import InputMismatchError


@dataclass(frozen=True, slots=True)
class _TensorLeaf:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLeaf:
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad
        )

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"
        return text + (" requiring a gradient" if self.requires_grad else "")


@dataclass(frozen=True)
class InputSignature:
    """Structure of (args, kwargs), and kind of every leaf."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    autocast: tuple[str, torch.dtype] | None  # the region that the call is in

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputSignature:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kinds = tuple(_TensorLeaf.of(x) if isinstance(x, Tensor) else x for x in leaves)
        return cls(spec, kinds, ambient_autocast())

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a call that matches.

        Raises:
            InputMismatchError: it does not; the text says what was planned and what came.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if ambient_autocast() != self.autocast:
            raise InputMismatchError(
                f"the call is in autocast region {ambient_autocast()}, and was planned for "
                f"{self.autocast}. {_ADVICE}"
            )
        if spec != self.spec:
            raise InputMismatchError(
                "the inputs have another structure than the sample: planned "
                f"{_describe(self.spec)}, got {_describe(spec)}. {_ADVICE}"
            )
        for place, (planned, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            found = _TensorLeaf.of(leaf) if isinstance(leaf, Tensor) else leaf
            if type(found) is not type(planned) or found != planned:
                same = isinstance(found, _TensorLeaf) and str(found) == str(planned)
                detail = f" (strides {planned.stride} and {found.stride})" if same else ""
                raise InputMismatchError(
                    f"input {place} differs from the sample: planned {planned}, got "
                    f"{found}{detail}. {_ADVICE}"
                )
        return leaves


_ADVICE = (
    "A plan holds for the sample's shapes, types, strides, Python values and autocast region. Call "
    "with such inputs, allow more plans (`max_plans=`), or call `.original` for an unbounded step."
)


def _describe(spec: pytree.TreeSpec) -> str:
    args, kwargs = spec.unflatten(["*"] * spec.num_leaves)
    return f"args {args}, kwargs {kwargs}"
