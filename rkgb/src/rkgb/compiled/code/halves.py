"""Forward and backward of a piece, as graphs: their inputs, saved tensors, and FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rkgb.torch_api.by_values import EXTRA_FLOP_FORMULAS, has_flops

Kind = Literal["primal", "tangent", "result", "gradient", "size"]
Place = tuple[Kind, int]  # an input, or a value that is made


class Halves:
    """Both graphs of a partition, changed so that the forward saves neither inputs nor their views.

    The backward takes the input itself and makes the view again; so the content of the input is
    guarded like that of any saved tensor. `number` gives the value of a size, which may be a
    symbol.
    """

    def __init__(
        self,
        forward: Any,
        backward: Any,
        count: int,
        places: Mapping[str, Place],
        number: Callable[[Any], int],
    ) -> None:
        self.places = places
        (output,) = forward.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        results, saved = outputs[:count], outputs[count:]
        behind = {node.name: node for node in inputs_of(backward)}
        for node in saved:
            if node.op != "placeholder" and _is_made_of_inputs(node) and node not in results:
                _rebuild(node, behind, backward.graph)
        saved = [n for n in saved if n.op != "placeholder" and behind[n.name].users]
        own = [n for n in dict.fromkeys(saved) if n not in results]
        self.kept_bytes = sum(number(node.meta["val"].untyped_storage().nbytes()) for node in own)
        output.args = ((*results, *own),)
        at = {node.name: place for place, node in reversed([*enumerate((*results, *own))])}
        for graph in (forward, backward):
            for node in inputs_of(graph):
                if not node.users and not (_is_size(node) and node.name in places):
                    graph.graph.erase_node(node)
            graph.graph.eliminate_dead_code()
            graph.recompile()
        self.takes: tuple[Place, ...] = tuple(places[n.name] for n in inputs_of(forward))
        self.takes_back: tuple[Place, ...] = tuple(
            places[n.name] if n.name in places else ("result", at[n.name])
            for n in inputs_of(backward)
        )


def inputs_of(graph: Any) -> list[Any]:
    """Return the placeholders of a graph."""
    return list(graph.graph.find_nodes(op="placeholder"))


def _is_size(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_made_of_inputs(node: Any) -> bool:
    """Return whether a node is an input, a view of one, or a size that follows from inputs."""
    if node.op != "call_function":
        return bool(node.op == "placeholder")
    is_view = getattr(node.target, "is_view", False) or _is_size(node)
    return is_view and all(map(_is_made_of_inputs, node.all_input_nodes))


def _rebuild(node: Any, behind: dict[str, Any], graph: Any) -> None:
    """Copy a node that follows from inputs into the backward."""
    old = behind[node.name]

    def made(source: Any) -> Any:
        if source.op == "placeholder":
            if source.name not in behind:
                with graph.inserting_before(next(iter(graph.nodes))):
                    behind[source.name] = graph.placeholder(source.name)
                    behind[source.name].meta = dict(source.meta)
            return behind[source.name]
        inputs = {each: made(each) for each in source.all_input_nodes}
        places = list(graph.nodes)
        first = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(max([first, *inputs.values()], key=places.index)):
            return graph.node_copy(source, inputs.__getitem__)

    old.replace_all_uses_with(made(node))


def is_heavy(target: Any) -> bool:
    return has_flops(getattr(target, "overloadpacket", None))


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
