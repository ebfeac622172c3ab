"""One primitive assignment of a captured forward: the alphabet of every graph in this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ref:
    """The value that goes by `name`, in place of the value itself."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast region that the forward enters."""

    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """`name = target(*args, **kwargs)`, run in the grad and autocast mode of its place."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module_path: str = ""
    source: str = ""  # "file.py:12"
    grad_enabled: bool = True
    autocast: Autocast | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names that the operation reads, in argument order, repeated when read twice."""
        return tuple(_refs((self.args, self.kwargs)))

    @property
    def target_name(self) -> str:
        """'linear' for aten.linear.default, 'getitem' for operator.getitem."""
        return str(getattr(self.target, "__name__", self.target)).split(".")[0]

    def __str__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.name} = {self.target_name}({', '.join(parts)})"


def _refs(tree: Any) -> list[str]:
    if isinstance(tree, Ref):
        return [tree.name]
    if isinstance(tree, Mapping):
        return [name for value in tree.values() for name in _refs(value)]
    if isinstance(tree, slice):
        return _refs((tree.start, tree.stop, tree.step))
    if isinstance(tree, (tuple, list)):
        return [name for value in tree for name in _refs(value)]
    return []


def map_refs(tree: Any, function: Callable[[str], Any]) -> Any:
    """Return `tree` with every Ref replaced by `function(name)`."""
    if isinstance(tree, Ref):
        return function(tree.name)
    if isinstance(tree, Mapping):
        return {key: map_refs(value, function) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_refs(v, function) for v in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple):
        return tuple(map_refs(value, function) for value in tree)
    if isinstance(tree, list):
        return [map_refs(value, function) for value in tree]
    return tree
