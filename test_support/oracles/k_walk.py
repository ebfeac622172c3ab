"""An oracle for K: run forward and backward by nothing but what the graph says.

The order is any that the data and the `after` of K allow, and memory is dropped as soon as K names
no further reader of it. So a missing edge makes the walk fail, and a wrong one shows in the
gradients.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oracles.gradients import assert_autograds_gradients, leaves_that_want
from rkgb.atlas.forward_backward import KGraph
from rkgb.elements.op import Ref, run_op
from rkgb.elements.sample import Sample
from rkgb.graphs.basic import external_values
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.torch_api.private.autograd import set_grad_mode, straight_to_kernels


def assert_k_gives_gradients(
    kg: KGraph,
    sg: SimplifiedGraph,
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
    given = Sample.of(model, sample, kwargs)
    walk = _Walk(kg, sg, model, given)
    assert_autograds_gradients(lambda: walk.run(seed), model, sample, given.device, kwargs=kwargs)


class _Walk:
    def __init__(self, kg: KGraph, sg: SimplifiedGraph, model: nn.Module, sample: Sample) -> None:
        self.kg, self.sg, self.model, self.sample = kg, sg, model, sample
        self.external = external_values(sg.basic, model, sample.leaves)
        self.values: dict[str, Any] = dict(self.external)
        self.seeded = False

    def run(self, seed: int | None) -> list[Tensor | None]:
        infos, basic = self.sg.infos, self.sg.basic
        unread = {data.name: set(data.users) for data in self.kg.data}
        kept = {infos[name].alias_of for name in (*self.sg.output_names, *self.external)}
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        place = {h: i for i, h in enumerate(basic.hand_overs)}
        with straight_to_kernels(), torch.no_grad():
            for number in self._order(seed):
                node = self.kg.compute[number]
                simplified = self.sg.nodes[node.node]
                if node.kind == "bwd":
                    self._seed_gradients()
                set_grad_mode(node.kind == "fwd")  # some kernels are chosen by it
                for op in simplified.ops if node.kind == "fwd" else simplified.backward:
                    run_op(op, self.values)
                if node.kind == "bwd":
                    for given in simplified.hand_overs:
                        value = self.values[given.value].clone()
                        parts.setdefault(given.leaf, []).append((place[given], value))
                # Memory that K says nobody reads any more is gone, and what K does not list.
                for data in unread:
                    unread[data].discard(node.name)
                alive = {name for name, users in unread.items() if users}
                alive |= {f"phantoms of fwd_{node.node}"} if node.kind == "fwd" else set()
                for name in list(self.values):
                    root = infos[name].alias_of
                    if root not in kept and self._keeper(root) not in alive:
                        del self.values[name]
        return self._gradients(parts)

    def _keeper(self, root: str) -> str:
        """Return the data node of K that a storage is part of."""
        maker = self.sg.producer.get(root)
        listed = {data.name for data in self.kg.data}
        return root if root in listed or maker is None else f"phantoms of fwd_{maker}"

    def _seed_gradients(self) -> None:
        """Give the results their gradients, once: all forwards have run."""
        if self.seeded:
            return
        self.seeded = True
        basic = self.sg.basic
        for root, name in zip(basic.roots, basic.tangent_names, strict=True):
            if name is not None:
                self.values[name] = torch.ones_like(self.values[root])

    def _gradients(self, parts: dict[str, list[tuple[int, Tensor]]]) -> list[Tensor | None]:
        found: dict[int, Tensor] = {}
        for out in self.sg.outputs:  # a parameter or input that is returned as it is
            if isinstance(out, Ref) and out.name in self.external:
                tensor = self.external[out.name]
                if tensor.requires_grad:
                    found[id(tensor)] = torch.ones_like(tensor)
        for leaf, mine in parts.items():
            key = id(self.external[leaf])
            for _, grad in sorted(mine, key=lambda part: part[0]):
                found[key] = found[key] + grad if key in found else grad
        return [found.get(id(t)) for t in leaves_that_want(self.model, self.sample)]

    def _order(self, seed: int | None) -> list[int]:
        """Return positions in `kg.compute` in an order that its edges allow."""
        place = {node.name: index for index, node in enumerate(self.kg.compute)}
        waiting = {i: {place[n] for n in node.after} for i, node in enumerate(self.kg.compute)}
        forwards = {i for i, node in enumerate(self.kg.compute) if node.kind == "fwd"}
        for data in self.kg.data:
            if len(data.producers) > 1:  # a sum that grows in place: its order is in `after`
                continue
            for user in data.users:
                waiting[place[user]].update(place[n] for n in data.producers if n != user)
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
