"""KGraph (K): the forward and backward graph with data, gradient and phantom nodes, and costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from rkgb.atlas.anonymize import node_key
from rkgb.atlas.inspection import CostChoice, inspect_model
from rkgb.costs.node_facts import NodeFacts
from rkgb.graphs.backward_slices import order_of
from rkgb.graphs.dataflow import Drawn
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.graphs.uses import roots_of


@dataclass(frozen=True, slots=True)
class KComputeNode:
    """One forward or backward computation; `node` is its index in the simplified graph."""

    name: str
    kind: Literal["fwd", "bwd"]
    node: int
    time_ms: float
    overhead_bytes: int  # temporary memory, above its inputs and outputs
    flops: int = 0
    module_path: str = ""
    source: str = ""
    op: str = ""  # the main operation of the simplified node
    key: str = ""  # equal for equal computations
    output_bytes: int = 0  # of a forward: the memory that it allocates
    saved_bytes: int = 0  # of a forward: its saved tensors, phantoms included
    after: tuple[str, ...] = ()  # computations that must come first though no data flows from them


@dataclass(frozen=True, slots=True)
class KDataNode:
    """One storage: of a value, of its gradient, or a phantom, which only a backward reads."""

    name: str
    kind: Literal["data", "grad", "phantom"]
    size_bytes: int
    producers: tuple[str, ...]  # a gradient has one for each use of its value
    users: tuple[str, ...]


@dataclass(frozen=True)
class KGraph(Drawn):
    """Compute nodes and data nodes of one forward and backward."""

    compute: tuple[KComputeNode, ...]
    data: tuple[KDataNode, ...]

    def __repr__(self) -> str:
        return f"<K graph: {len(self.compute)} compute nodes, {len(self.data)} data nodes>"

    def to_json(self) -> str:
        """Return the graph and its costs as JSON text."""
        return json.dumps(
            {"compute": [asdict(n) for n in self.compute], "data": [asdict(n) for n in self.data]}
        )

    @classmethod
    def from_json(cls, text: str) -> KGraph:
        """Read what `to_json` wrote."""

        def tuples(row: Mapping[str, Any]) -> dict[str, Any]:
            return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}

        rows = json.loads(text)
        compute = (KComputeNode(**tuples(row)) for row in rows["compute"])
        return cls(tuple(compute), tuple(KDataNode(**tuples(row)) for row in rows["data"]))

    def renamed(self, sg: SimplifiedGraph) -> KGraph:
        """Return this graph with the names and module paths of `sg`, an equal block."""
        mains = [sg.nodes[node.node].main for node in self.compute]
        pairs = zip(self.compute, mains, strict=True)
        nodes = (replace(n, module_path=main.module_path, source=main.source) for n, main in pairs)
        return KGraph(tuple(nodes), self.data)

    def __str__(self) -> str:
        lines = []
        for n in self.compute:
            place = f"({n.module_path or 'root'}, {n.source})"
            kept = f", makes {n.output_bytes} B, saves {n.saved_bytes} B" if n.kind == "fwd" else ""
            cost = f"{n.time_ms:.3f} ms, overhead {n.overhead_bytes} B"
            lines.append(f"{n.name} {n.op} {place}  {cost}{kept}")
        lines += [
            f"{n.kind} {n.name}  {n.size_bytes} B  {', '.join(n.producers)} -> {', '.join(n.users)}"
            for n in self.data
        ]
        return "\n".join(lines)


def S_to_K(
    sg: SimplifiedGraph,
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    cost: CostChoice = "measured",
) -> KGraph:
    """Measure `sg` and return its forward-backward graph; see `inspect_model` for the rest."""
    inspection = inspect_model(sg, model, device, inputs=inputs, kwargs=kwargs, cost=cost)
    return k_graph(sg, inspection.facts)


def k_graph(sg: SimplifiedGraph, facts: Sequence[NodeFacts]) -> KGraph:
    """Assemble the graph from the facts of its nodes; nothing is run."""
    keys = [hashlib.sha1(node_key(sg, node).encode()).hexdigest()[:12] for node in sg.nodes]
    compute = [_forward(sg, index, fact, keys[index]) for index, fact in enumerate(facts)]
    after = order_of([node.backward for node in sg.nodes], sg.infos)
    gradients = _gradients(sg)
    single = [data for data in gradients if len(data.producers) == 1]
    flowing = {(user, data.producers[0]) for data in single for user in data.users}
    for index in reversed(range(len(facts))):
        if facts[index].has_backward:
            node = _computation(sg, index, "bwd", facts[index], keys[index])
            others = (f"bwd_{other}" for other in after[index] if facts[other].has_backward)
            others = (other for other in others if (node.name, other) not in flowing)
            compute.append(replace(node, after=tuple(others)))
    data: list[KDataNode] = []
    for index, fact in enumerate(facts):
        for storage in fact.storages:
            if storage.is_phantom:
                continue
            readers = [f"fwd_{i}" for i in storage.fwd_users]
            readers += [f"bwd_{i}" for i in storage.bwd_users]
            size, users = storage.size_bytes, tuple(readers)
            data.append(KDataNode(storage.root, "data", size, (f"fwd_{index}",), users))
        if size := fact.phantom_bytes:
            name, ends = f"phantoms of fwd_{index}", ((f"fwd_{index}",), (f"bwd_{index}",))
            data.append(KDataNode(name, "phantom", size, *ends))
    return KGraph(tuple(compute), (*data, *gradients))


def _gradients(sg: SimplifiedGraph) -> list[KDataNode]:
    """Return the gradients that a backward reads from another one or from outside."""
    infos, behind = sg.infos, sg.uses_behind
    known = {*sg.producer, *sg.basic.externals}
    found = []
    for root, reads in behind.reads.items():
        if root in known:
            continue
        writing = [at.part for at in behind.writes.get(root, ())]
        writers = dict.fromkeys([behind.maker[root], *writing] if root in behind.maker else writing)
        readers = dict.fromkeys(at.part for at in reads)
        others = [f"bwd_{i}" for i in readers if len(writers) != 1 or i not in writers]
        if others:
            names = tuple(f"bwd_{i}" for i in writers)
            found.append(KDataNode(root, "grad", infos[root].counted_bytes, names, tuple(others)))
    return found


def _forward(sg: SimplifiedGraph, index: int, fact: NodeFacts, key: str) -> KComputeNode:
    node, infos, home = sg.nodes[index], sg.infos, sg.producer
    read = roots_of(infos, node.read_by_backward)
    saved = {root for root in read if root in home or root in sg.input_names}
    flowing = {home[name] for name in node.inputs if name in home}
    return replace(
        _computation(sg, index, "fwd", fact, key),
        output_bytes=sum(s.size_bytes for s in fact.storages if not s.is_phantom),
        saved_bytes=sum(infos[root].counted_bytes for root in saved),
        after=tuple(f"fwd_{dep}" for dep in node.deps if dep not in flowing),
    )


def _computation(
    sg: SimplifiedGraph, index: int, kind: Literal["fwd", "bwd"], fact: NodeFacts, key: str
) -> KComputeNode:
    """Return one side of a node, without what only forwards have."""
    node, cost, forward = sg.nodes[index], fact.cost, kind == "fwd"
    return KComputeNode(
        name=f"{kind}_{index}",
        kind=kind,
        node=index,
        time_ms=cost.fwd_time_ms if forward else cost.bwd_time_ms,
        overhead_bytes=fact.fwd_overhead_bytes if forward else fact.bwd_overhead_bytes,
        flops=cost.fwd_flops if forward else cost.bwd_flops,
        module_path=node.module_path,
        source=node.main.source,
        op=node.main.target_name,
        key=key,
    )
