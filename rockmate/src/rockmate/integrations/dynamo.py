"""`torch.compile(model, backend="rockmate", options={"budget": "8GB"})`: dynamo's graphs, planned.

Dynamo says when a graph serves (its guards) and makes another where it does not. A graph of a whole
model is planned at its first call. Where dynamo breaks a model in several graphs, nobody could add
up what they keep, and what runs plain between them: such a model is planned as a whole, by
`rockmate.apply`, from its second step on. Parameters and buffers come with every call, as inputs:
behind a graph break one graph serves several layers, each with its own.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

from rockmate.decisions.recomputed import run_recomputed
from rockmate.errors import UnsupportedModuleError
from rockmate.in_place import amount, apply, checked
from rockmate.module import Rockmate

_log = logging.getLogger("rockmate")
_CALL = "torch.compile(backend='rockmate')"
_CALLS = ("_call_impl", "_wrapped_call_impl", "inner")  # functions of torch around a forward
_shared: dict[int, SharedBudget] = {}  # by the object that was given as options


def rockmate(
    graph: GraphModule,
    inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> PlannedGraph:
    """Plan a graph of dynamo: `torch.compile(model, backend="rockmate", options={...})`.

    Options are the keywords of `rockmate.apply`; without any, `ROCKMATE_BUDGET` is the budget. All
    graphs that share the options share the budget, so that only one of them may be under way. A
    model that dynamo breaks in several graphs is planned in place, as a whole: in its first step
    each graph keeps nothing but its inputs, and the second one is planned. `mode` has no effect: it
    is for inductor's kernels, and these are eager's.

    Examples:
        >>> compiled = torch.compile(model, backend="rockmate", options={"budget": "8GB"})
        >>> compiled(x).sum().backward()

    Raises:
        UnsupportedModuleError: at a call, where another graph waits for its backward.
        InfeasibleBudgetError, RockmateError, rkgb.RkgbError: at the first call of a graph, as from
            `rockmate.apply`.
    """
    known = _shared.setdefault(id(options), SharedBudget(options))
    return PlannedGraph(graph, known)


class SharedBudget:
    """What the graphs of one `torch.compile` have in common."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self.options = options  # kept, so that no other object gets its identity
        self.bytes_of: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()  # by parameters
        self._under_way: list[weakref.ref[Backward]] = []

    def keywords(self) -> dict[str, Any]:
        """Return what `apply` is called with.

        Raises:
            ArgumentsError, BudgetFormatError: they say no budget, or something unknown.
        """
        given = dict(self.options or {})
        given |= amount(given.get("budget"), given.get("memory"))
        return checked(given, _CALL)

    def refuse_two(self) -> None:
        """Refuse a forward while another one waits for its backward.

        Raises:
            UnsupportedModuleError: the two could hold more than the budget together.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpoint runs a forward again
            return
        waiting = [ref for ref in self._under_way if (one := ref()) and not one.has_begun]
        self._under_way = waiting
        if waiting:
            raise UnsupportedModuleError(
                "a compiled graph runs while another one waits for its backward, and together "
                "they would hold more than the budget. Let each backward come before the next "
                "forward, delete outputs that get none, and give models that train side by side "
                "options of their own. If torch.compile has broken a function in several graphs, "
                "fullgraph=True names the line: compile the model that it calls instead."
            )

    def watch(self, outputs: Any) -> None:
        """Remember that a backward is to come, until it begins or its graph is dropped."""
        backward = Backward()
        for output in outputs:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(backward.begin)
                self._under_way.append(weakref.ref(backward))


class Backward:
    """One backward that is to come; autograd holds it as long as it may."""

    has_begun = False

    def begin(self, _: Any) -> None:
        """Note that it has come."""
        self.has_begun = True


class PlannedGraph:
    """A graph of dynamo, planned at its first call if it is one of a whole model."""

    is_part: bool | None = None  # not known before the first call

    def __init__(self, graph: GraphModule, budget: SharedBudget) -> None:
        self.budget = budget
        self.why = getattr(graph, "compile_subgraph_reason", None)  # it ends where it does
        self.graph, self.places = _with_own_tensors(graph)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph, within the budget where anything trains."""
        rest = []
        for value, (table, name) in zip(inputs, self.places, strict=True):
            if not table:
                rest.append(value)
            elif getattr(self.graph, table).get(name) is not value:
                getattr(self.graph, table)[name] = value
        trains = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        if not (trains and torch.is_grad_enabled()):
            return self._plain()(*rest)
        if self.is_part is not False and (model := _compiled_model()) is not None:
            self.is_part = self.is_part or self._leaves_out(model, inputs)
            if self.is_part:
                return self._run_part(model, rest)
        self.is_part = False
        self.budget.refuse_two()
        if not isinstance(self.graph, Rockmate):
            apply(self.graph, **self._keywords(inputs))
        outputs = self.graph(*rest)
        self._note_bytes(inputs)
        self.budget.watch(outputs)
        return outputs

    def _leaves_out(self, model: nn.Module, inputs: Sequence[Any]) -> bool:
        """Whether more of a model runs in its step than this graph."""
        own = set(map(id, inputs))
        ends = getattr(self.why, "graph_break", False)
        return ends or any(p.requires_grad and id(p) not in own for p in model.parameters())

    def _run_part(self, model: nn.Module, args: Sequence[Any]) -> Any:
        """Let the model be planned at its next step, and keep nothing but the inputs in this one.

        Raises:
            UnsupportedModuleError: the module is none that can be planned in place.
        """
        if not isinstance(model, Rockmate):
            apply(model, **self.budget.keywords())
            _log.info(
                "torch.compile runs %s in several graphs, or leaves parts of it out "
                "(fullgraph=True names the line): it is planned as a whole from its next step on",
                type(model).__name__,
            )
        graph = self._plain()
        own: nn.Module = object.__new__(type(graph))  # others call the graph with their parameters
        tables = {name: dict(vars(graph)[name]) for name in ("_parameters", "_buffers")}
        object.__setattr__(own, "__dict__", {**vars(graph), **tables})
        name = type(model).__name__
        return run_recomputed(
            own, f"a graph of {name}", tuple(args), {}, writes_buffers=bool(own._buffers)
        )

    def _keywords(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return those of `apply`; a fraction is one of the first plan for these parameters."""
        given, bytes_of = self.budget.keywords(), self.budget.bytes_of
        known = [bytes_of[v] for v in inputs if isinstance(v, nn.Parameter) and v in bytes_of]
        return {**given, "budget": known[0]} if known and given["memory"] is None else given

    def _note_bytes(self, inputs: Sequence[Any]) -> None:
        assert isinstance(self.graph, Rockmate)
        for value in inputs:
            if isinstance(value, nn.Parameter):
                self.budget.bytes_of.setdefault(value, self.graph.budget_bytes)

    def _plain(self) -> nn.Module:
        return self.graph.original if isinstance(self.graph, Rockmate) else self.graph


def _compiled_model() -> nn.Module | None:
    """Return the module whose compiled call runs now; None if it is a function's."""
    found, frame = None, sys._getframe(1)
    while frame.f_code.co_name != "compile_wrapper":
        is_call = frame.f_code.co_name in _CALLS
        found = frame.f_locals.get("self", found) if is_call else None  # not if code calls it
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return found if isinstance(found, nn.Module) else None


def _with_own_tensors(graph: GraphModule) -> tuple[GraphModule, list[tuple[str, str]]]:
    """Return the graph with parameters and buffers as its own, and where each input belongs.

    They are resident, as those of a module are, and their gradients do not count.
    """
    tables = {node.name: _table(node) for node in graph.graph.find_nodes(op="placeholder")}
    # A copy, because dynamo goes on with the graph that it has given.
    own = GraphModule(graph, copy.deepcopy(graph.graph))
    for node in own.graph.find_nodes(op="placeholder"):
        if table := tables[node.name]:
            getattr(own, table)[node.name] = None
            with own.graph.inserting_before(node):
                node.replace_all_uses_with(own.graph.create_node("get_attr", node.name))
            own.graph.erase_node(node)
    own.recompile()
    return own, [(table, name) for name, table in tables.items()]


def _table(node: Node) -> str:
    """Return where a module has the input of a graph; "" where it is no module's."""
    source = str(getattr(getattr(node, "_dynamo_source", None), "name", ""))
    return next((table for table in ("_parameters", "_buffers") if f".{table}['" in source), "")
