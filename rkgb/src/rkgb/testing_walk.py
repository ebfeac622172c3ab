"""An oracle for K: run forward and backward by nothing but what the graph says.

The order is any that the data and the `after` of K allow, and every piece of memory is dropped as
soon as K names no further reader of it. So a missing edge makes the walk fail, and a wrong one
shows in the gradients.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.backward import KGraph
from rkgb.basic import bind_inputs, external_values
from rkgb.inspect_op import Inspection
from rkgb.op import Ref
from rkgb.runner import Runner, StepState
from rkgb.tensor_info import storage_id
from rkgb.testing import _leaves_that_want, assert_autograds_gradients


def assert_k_gives_gradients(
    kg: KGraph,
    inspection: Inspection,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> None:
    """Assert that walking `kg` gives autograd's gradients bit for bit.

    The order is the graph's own, or with `seed` a random one. Buffers and the random stream are as
    before afterwards.

    Raises:
        AssertionError: a gradient differs, exists on one side only, or memory is left over.
        KeyError: something was dropped that was still to be read.
    """
    walk = _Walk(kg, inspection, model, bind_inputs(sample, kwargs))
    device = inspection.runner.device
    assert_autograds_gradients(lambda: walk.run(seed), model, sample, device, kwargs=kwargs)


class _Walk:
    def __init__(
        self, kg: KGraph, inspection: Inspection, model: nn.Module, bound: tuple[Any, Any]
    ) -> None:
        self.kg = kg
        self.model = model
        self.bound = bound
        self.runner = _sorting(inspection.runner)
        self.graph = inspection.runner.graph
        leaves = tuple(pytree.tree_leaves(bound))
        self.state = StepState(external_values(self.graph.dataflow.basic, model, leaves))
        self.names = {s.names[0]: s.names for fact in inspection.facts for s in fact.storages}

    def run(self, seed: int | None) -> list[Tensor | None]:
        returned = {name for name in self.graph.output_names if name in self.runner.grad_names}
        unread = {node.name: set(node.users) for node in self.kg.data if node.kind == "data"}
        parts: dict[int, list[tuple[int, str, Tensor]]] = {}
        seeded = False
        for number in self._order(seed):
            node = self.kg.compute[number]
            if node.kind == "fwd":
                self.runner.forward(node.node, self.state, record=True, keep_state=False)
            else:
                if not seeded:
                    self._seed_gradients(returned)
                    seeded = True
                for name, grad in self.runner.backward(node.node, self.state):
                    if grad is not None:
                        key = id(self.state.external[name])
                        parts.setdefault(key, []).append((-node.node, name, grad))
            for data in self.kg.data:
                if data.kind == "data" and node.name in (*data.users, *data.producers):
                    unread[data.name].discard(node.name)
                    names = self.names[data.name]
                    if not unread[data.name] and (seeded or not returned & set(names)):
                        for name in names:
                            self.state.values.pop(name, None)
        assert not self.state.values, f"never read: {', '.join(self.state.values)}"
        assert not self.state.grads, f"gradients left over: {', '.join(self.state.grads)}"
        assert not self.state.grad_parts, f"left over: {', '.join(self.state.grad_parts)}"
        return self._gradients(parts)

    def _seed_gradients(self, returned: set[str]) -> None:
        for name in returned:
            self.state.grads[name] = torch.ones_like(self.state.values[name])
            self.state.borrowed.add(storage_id(self.state.grads[name]))
        read = {
            name for data in self.kg.data if data.users for name in self.names.get(data.name, ())
        }
        for name in self.graph.output_names:
            if name not in read:  # returned, and no node reads it
                self.state.values.pop(name, None)

    def _gradients(self, parts: dict[int, list[tuple[int, str, Tensor]]]) -> list[Tensor | None]:
        external = self.state.external
        found: dict[int, Tensor] = {}
        for out in self.graph.outputs:  # a parameter or input that is returned as it is
            if isinstance(out, Ref) and out.name in external and external[out.name].requires_grad:
                found[id(external[out.name])] = torch.ones_like(external[out.name])
        for key, mine in parts.items():
            for _, _, grad in sorted(mine, key=lambda part: part[0]):  # stable: uses stay in order
                found[key] = found[key] + grad if key in found else grad
        return [found.get(id(t)) for t in _leaves_that_want(self.model, self.bound)]

    def _order(self, seed: int | None) -> list[int]:
        """Return positions in `kg.compute` in an order that its edges allow."""
        place = {node.name: index for index, node in enumerate(self.kg.compute)}
        waiting = {i: {place[n] for n in node.after} for i, node in enumerate(self.kg.compute)}
        forwards = {i for i, node in enumerate(self.kg.compute) if node.kind == "fwd"}
        for data in self.kg.data:
            for user in data.users:
                waiting[place[user]].update(place[name] for name in data.producers)
        for index, node in enumerate(self.kg.compute):
            if node.kind == "bwd":  # the gradient of the results exists once they all do
                waiting[index] |= forwards
        source = random.Random(seed)
        order: list[int] = []
        while waiting:
            done = set(order)
            ready = [index for index, deps in waiting.items() if deps <= done]
            assert ready, "the edges of K run in a circle"
            order.append(ready[0] if seed is None else source.choice(ready))
            del waiting[order[-1]]
        return order


def _sorting(runner: Runner) -> Runner:
    """Return a runner that adds the gradients of every value in autograd's order.

    A plan runs backwards in one order, in which most sums come out right by themselves.
    """
    copy = Runner(runner.graph, runner.device)
    copy.facts.update(runner.facts)
    copy.grad_names.update(runner.grad_names)
    copy.always_record.update(runner.always_record)
    copy.collected = frozenset(copy.grad_names)
    return copy
