"""The FLOPs of compiled graphs, whose sizes may be symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rkgb.torch_api.by_values import EXTRA_FLOP_FORMULAS


def is_heavy(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", None)
    return packet in flop_registry or packet in EXTRA_FLOP_FORMULAS


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a graph: torch's formulas with their arguments, whose sizes may be symbols.

    The formulas run later: they would ask a symbol for its value, and so specialise the code.
    """

    calls: tuple[tuple[Callable[..., Any], Any, Any], ...]

    @classmethod
    def of(cls, graph: Any) -> Flops:
        """Collect the heavy operations of a graph."""
        calls: list[tuple[Callable[..., Any], Any, Any]] = []
        for node in graph.graph.nodes:
            packet = getattr(node.target, "overloadpacket", None)
            if node.op != "call_function" or not is_heavy(node.target):
                continue
            args = tuple(_shown(arg) for arg in node.args)
            if packet in EXTRA_FLOP_FORMULAS:
                shapes = [arg for arg in args if isinstance(arg, torch.Size)]
                calls.append((EXTRA_FLOP_FORMULAS[packet], shapes, {}))
            else:
                kwargs = {**node.kwargs, "out_val": _shown(node)}
                calls.append((flop_registry[packet], args, kwargs))
        return cls(tuple(calls))

    def count(self, number: Callable[[Any], int]) -> int:
        """Return the FLOPs; `number` gives the value of each size."""
        values = functools.partial(_with_values, number=number)
        return sum(int(formula(*values(args), **values(kw))) for formula, args, kw in self.calls)


def _shown(argument: Any) -> Any:
    """Return an argument as formulas read it: shapes in place of tensors."""
    if isinstance(argument, (tuple, list)):
        return type(argument)(_shown(each) for each in argument)
    value = getattr(argument, "meta", {}).get("val", argument)
    if isinstance(value, (tuple, list)):
        return tuple(each.shape if isinstance(each, Tensor) else each for each in value)
    return value.shape if isinstance(value, Tensor) else value


def _with_values(tree: Any, number: Callable[[Any], int]) -> Any:
    if isinstance(tree, (tuple, list)):
        values = [_with_values(each, number) for each in tree]
        return torch.Size(values) if isinstance(tree, torch.Size) else type(tree)(values)
    if isinstance(tree, dict):
        return {key: _with_values(value, number) for key, value in tree.items()}
    return number(tree) if isinstance(tree, torch.SymInt) else tree
