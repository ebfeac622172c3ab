"""Replace recorded operations by compiled pieces, and update the facts about values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rkgb.compiled.code.classes import CompiledClass, Returned
from rkgb.compiled.pieces.joint import Joint
from rkgb.elements.op import Op, Ref, call_like
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode


class MoveStatistics:
    """Update the running statistics of a batch norm by those of a batch, as eager does."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.__name__ = "move_statistics"

    def __repr__(self) -> str:
        return f"rkgb.move_statistics {self.momentum!r}"

    def __call__(self, mean: Tensor, variance: Tensor, new_mean: Tensor, new: Tensor) -> None:
        for running, batch in ((mean, new_mean), (variance, new)):
            running.mul_(1 - self.momentum).add_(batch, alpha=self.momentum)


def replaced(
    sg: SimplifiedGraph, compiled: Mapping[int, tuple[Joint, CompiledClass]]
) -> SimplifiedGraph:
    """Return a graph with the operations of its compiled nodes replaced."""
    facts = _Facts(sg)
    nodes = list(sg.nodes)
    for index, node in enumerate(nodes):
        if index in compiled:
            nodes[index] = facts.forward(node, *compiled[index])
        else:
            facts.follow(node.ops)
    for index in reversed(range(len(nodes))):
        if index in compiled:
            nodes[index] = facts.backward(nodes[index], *compiled[index])
        else:
            facts.follow(nodes[index].backward)
    basic = replace(sg.basic, infos=facts.infos)
    return replace(sg.with_basic(basic), nodes=tuple(nodes))


class _Facts:
    """Facts about values while operations are replaced; views follow values that move."""

    def __init__(self, sg: SimplifiedGraph) -> None:
        self.recorded: Mapping[str, TensorInfo] = sg.infos
        self.infos = dict(self.recorded)
        self.made: dict[str, tuple[str, ...]] = {}  # results by the name of the operation

    def follow(self, ops: Sequence[Op]) -> None:
        """Move views of values that have moved to another storage."""
        for op in ops:
            for name in filter(None, op.results):
                info = self.recorded[name]
                sources = (n for n in op.inputs if self.recorded[n].alias_of == info.alias_of)
                source = next(sources, None)
                if info.alias_of == name or source is None:
                    continue
                old, new = self.recorded[source], self.infos[source]
                if (old.alias_of, old.offset) != (new.alias_of, new.offset):
                    self.infos[name] = replace(
                        info,
                        alias_of=new.alias_of,
                        storage_bytes=new.storage_bytes,
                        offset=info.offset - old.offset + new.offset,
                    )

    def forward(self, node: SimplifiedNode, joint: Joint, code: CompiledClass) -> SimplifiedNode:
        """Return a node with its forward replaced."""
        main = node.main
        first = joint.results[0]
        count = len(code.results) - len(joint.results)
        word = "held" if code.keeps_more else "kept"  # distinct, since both are measured
        extra = [self._new(f"{first}_{word}_{place}") for place in range(count)]
        results = (*joint.results, *extra)
        self.made[first] = results
        places = {"primal": joint.primals, "tangent": joint.tangents, "result": results}
        self._describe(results, code.results, places)
        takes = (joint.primals[place] for place in code.takes)
        run = call_like(main, code.forward, takes, results)
        moves = []
        for place, statistics in enumerate(joint.statistics):
            buffers = (statistics.mean, statistics.variance)
            moves.append(
                Op(
                    name=f"{extra[2 * place]}_moved",
                    target=MoveStatistics(statistics.momentum),
                    args=tuple(map(Ref, (*buffers, *extra[2 * place : 2 * place + 2]))),
                    kwargs={},
                    results=(),
                    module_path=main.module_path,
                    source=main.source,
                    writes=buffers,
                )
            )
        name = f"compiled {node.name}"
        return replace(node, name=name, ops=(run, *moves, *joint.effects))

    def backward(self, node: SimplifiedNode, joint: Joint, code: CompiledClass) -> SimplifiedNode:
        """Return a node with its backward replaced."""
        results = self.made[joint.results[0]]
        places = {
            **{"primal": joint.primals, "tangent": joint.tangents},
            **{"result": results, "gradient": joint.gradients},
        }
        self._describe(joint.gradients, code.gradients, places)
        takes = (places[kind][at] for kind, at in code.takes_back)
        run = call_like(joint.backward[0], code.backward, takes, joint.gradients)
        return replace(node, backward=(run,))

    def _describe(
        self, names: Sequence[str], made: Sequence[Returned], places: Mapping[str, Sequence[str]]
    ) -> None:
        for name, form in zip(names, made, strict=True):
            kind, at = form.home
            home = places[kind][at] if kind in places else names[at]
            root = name if home == name else self.infos[home].alias_of
            known = self.recorded.get(name)
            wants = known.requires_grad if known is not None else False
            info = replace(form.info, alias_of=root, requires_grad=wants)
            # How what comes in lies in its storage was recorded, and is no matter of the class.
            if known is not None and root == known.alias_of and root != name:
                info = replace(info, offset=known.offset, storage_bytes=known.storage_bytes)
            elif home != name:
                info = replace(info, storage_bytes=self.infos[home].storage_bytes)
            self.infos[name] = info

    def _new(self, name: str) -> str:
        while name in self.infos:
            name += "_"
        self.infos[name] = TensorInfo((), torch.float32, (), False, name, 0, 0)
        return name
