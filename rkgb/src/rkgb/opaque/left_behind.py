"""What a call leaves behind: parameters that it writes to, and attributes that hold tensors.

A tensor with its history in an attribute (the auxiliary loss of a router) is a result of the call:
gradients come to it as they come to what is returned.
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
    """What a call was seen to leave."""

    written: tuple[str, ...]  # parameters
    moves: bool  # whether any of them gets other memory
    attributes: tuple[_Name, ...] = ()  # in which it leaves tensors with their history


class Attributes:
    """The attributes of a module and of those in it that hold tensors."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.values: dict[_Name, Any] = {}
        for inner, part in module.named_modules(prefix=path):
            for name, value in vars(part).items():
                if name not in OF_MODULE and not callable(value) and holds_tensors(value):
                    self.values[inner, name] = value
        self._tensors = [t for value in self.values.values() for t in _tensors(value)]

    def with_history(self, before: Attributes) -> dict[_Name, Structure]:
        """Return those that hold nothing but tensors made since, some with a history: their trees.

        What was there `before` is no result of a call that ran since, nor is what lies beside it.
        Gradients that are to be kept come to the tensors themselves.
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
        """Return autograd's nodes that have made what is in an attribute."""
        return {t.grad_fn for t in _tensors(self.values[name]) if t.grad_fn is not None}

    def goes_back_to(self, name: _Name, nodes: set[Any]) -> bool:
        """Whether the history of what is in an attribute leads to one of these nodes."""
        return not nodes.isdisjoint(nodes_from([*self.nodes(name)]))


def _tensors(value: Any) -> list[Tensor]:
    try:
        return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    except UnknownTreeError:
        return []
