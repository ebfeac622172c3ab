"""Side effects of an opaque call: written parameters, and attributes that hold tensors.

A tensor with a history in an attribute (the auxiliary loss of a router) is a result of the call: it
gets gradients like a returned tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rkgb.elements.trees import Structure, UnknownTreeError, flatten, holds_tensors
from rkgb.guards.contents import OF_MODULE
from rkgb.opaque.inner_graph import nodes_from

_Name = tuple[str, str]  # path of the module, and name of the attribute


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The observed side effects of a call."""

    written: tuple[str, ...]  # parameters
    moves: bool  # whether one of them gets other memory
    retains: bool = False  # whether tensors that it makes retain their gradients
    attributes: tuple[_Name, ...] = ()  # in which it leaves tensors with a history


class Attributes:
    """The attributes of a module and its submodules that hold tensors."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.values: dict[_Name, Any] = {}
        for inner, part in module.named_modules(prefix=path):
            for name, value in vars(part).items():
                if name not in OF_MODULE and not callable(value) and holds_tensors(value):
                    self.values[inner, name] = value
        self._tensors = [t for value in self.values.values() for t in _tensors(value)]

    def with_history(self, before: Attributes) -> dict[_Name, Structure]:
        """Return the attributes that hold only new tensors, some with a history, as trees.

        A container that also holds tensors from `before` is no result of the call. Tensors that
        retain their gradients are left out, because these must get them directly.
        """
        known = {id(tensor) for tensor in before._tensors}
        found = {}
        for name, value in self.values.items():
            try:
                leaves, structure = flatten(value)
            except UnknownTreeError:
                continue
            made = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in known]
            if len(made) < len(leaves) or any(t.retains_grad for t in made):
                continue
            if any(t.grad_fn is not None for t in made):
                found[name] = structure
        return found

    def nodes(self, name: _Name) -> set[Any]:
        """Return the autograd nodes that made the tensors in an attribute."""
        return {t.grad_fn for t in _tensors(self.values[name]) if t.grad_fn is not None}

    def goes_back_to(self, name: _Name, nodes: set[Any]) -> bool:
        """Return whether the history of an attribute's tensors contains one of these nodes."""
        return not nodes.isdisjoint(nodes_from([*self.nodes(name)]))


def _tensors(value: Any) -> list[Tensor]:
    try:
        return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    except UnknownTreeError:
        return []
