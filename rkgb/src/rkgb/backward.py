"""KGraph (K): the forward and backward graph with data, gradient and phantom nodes, and costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.anonymize import node_key
from rkgb.basic import bind_inputs, external_values
from rkgb.dataflow import _device_of
from rkgb.inspect_op import (
    CostSource,
    FlopCost,
    Inspection,
    KnownCosts,
    MeasuredTime,
    NodeFacts,
    inspect_graph,
)
from rkgb.runner import Runner
from rkgb.simplified import SimplifiedGraph
from rkgb.tensor_info import TensorInfo

CostChoice = Literal["measured", "flops"] | KnownCosts


@dataclass(frozen=True, slots=True)
class KComputeNode:
    """One forward or backward computation; `node` is its index in the simplified graph."""

    name: str
    kind: Literal["fwd", "bwd"]
    node: int
    time_ms: float
    overhead_bytes: int  # temporary memory, above what it reads and leaves behind
    flops: int = 0
    module_path: str = ""
    source: str = ""
    op: str = ""  # the main operation of the simplified node
    key: str = ""  # equal for equal computations
    output_bytes: int = 0  # of a forward: the memory that it makes, views of resident left out
    saved_bytes: int = 0  # of a forward: what its backward reads, phantoms included
    after: tuple[str, ...] = ()  # must run first although no data flows: memory, random numbers


@dataclass(frozen=True, slots=True)
class KDataNode:
    """One piece of memory: a value, its gradient, or what only a backward knows (phantom)."""

    name: str
    kind: Literal["data", "grad", "phantom"]
    size_bytes: int
    producers: tuple[str, ...]  # a gradient has one per use of its value
    users: tuple[str, ...]


@dataclass(frozen=True)
class KGraph:
    """Compute nodes and data nodes of one forward and backward."""

    compute: tuple[KComputeNode, ...]
    data: tuple[KDataNode, ...]

    def to_json(self) -> str:
        """Return the graph and its costs as JSON text."""
        return json.dumps(
            {"compute": [asdict(n) for n in self.compute], "data": [asdict(n) for n in self.data]}
        )

    @classmethod
    def from_json(cls, text: str) -> KGraph:
        """Read what `to_json` wrote."""
        rows = json.loads(text)
        return cls(
            tuple(KComputeNode(**{**row, "after": tuple(row["after"])}) for row in rows["compute"]),
            tuple(
                KDataNode(
                    **{**row, "producers": tuple(row["producers"]), "users": tuple(row["users"])}
                )
                for row in rows["data"]
            ),
        )

    def renamed(self, sg: SimplifiedGraph) -> KGraph:
        """Return this graph for an equal block `sg`: its names and module paths, same costs."""
        nodes = [
            replace(
                node,
                module_path=sg.nodes[node.node].module_path,
                source=sg.nodes[node.node].main.source,
            )
            for node in self.compute
        ]
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
    """Measure `sg` and return its forward-backward graph.

    `inputs` is the sample that the model was captured with; without it, random values of the
    recorded shapes stand in (zeros for integers, which are valid indices).
    """
    inspection = inspect_model(sg, model, device, inputs=inputs, kwargs=kwargs, cost=cost)
    return k_graph(sg, inspection)


def inspect_model(
    sg: SimplifiedGraph,
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    cost: CostChoice = "measured",
    measure_memory: bool = True,
) -> Inspection:
    """Run and measure every class of nodes of `sg` on the sample."""
    place = torch.device(device) if device is not None else _device_of(model, None)
    basic = sg.dataflow.basic
    infos = sg.dataflow.infos
    if inputs is None and kwargs is None:
        leaves = tuple(
            None if name is None else _stand_in(infos[name], place) for name in basic.inputs
        )
    else:
        leaves = tuple(pytree.tree_leaves(bind_inputs(inputs, kwargs)))
    values = {name: _stand_in(infos[name], place) for name in sg.input_names}
    return inspect_graph(
        Runner(sg, place),
        external_values(basic, model, leaves),
        cost_source(cost, place),
        values=values,
        measure_memory=measure_memory,
    )


def cost_source(cost: CostChoice, device: torch.device) -> CostSource | KnownCosts:
    """Return the source of costs that the user chose by name, or the recording itself.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(cost, KnownCosts):
        return cost
    if cost == "measured":
        return MeasuredTime(device)
    if cost == "flops":
        return FlopCost()
    raise ValueError(
        f"cost {cost!r} was asked for; choose 'measured', 'flops', or RecordedCosts.load(path)."
    )


def _stand_in(info: TensorInfo, device: torch.device) -> Tensor:
    if info.dtype.is_floating_point or info.dtype.is_complex:
        tensor = torch.randn(info.shape, dtype=info.dtype, device=device)
    else:
        tensor = torch.zeros(info.shape, dtype=info.dtype, device=device)
    return tensor.requires_grad_(info.requires_grad)


def k_graph(sg: SimplifiedGraph, inspection: Inspection) -> KGraph:
    """Assemble the graph from the facts of an inspection; nothing is run."""
    facts = inspection.facts
    grad_names = inspection.runner.grad_names
    infos = sg.dataflow.infos
    keys = [hashlib.sha1(node_key(sg, node).encode()).hexdigest()[:12] for node in sg.nodes]
    sizes = {n: (s.names[0], s.size_bytes) for f in facts for s in f.storages for n in s.names}
    compute = [_forward(sg, index, fact, keys[index], sizes) for index, fact in enumerate(facts)]
    compute += [
        _computation(sg, index, "bwd", facts[index], keys[index])
        for index in reversed(range(len(facts)))
        if facts[index].wants_grad
    ]
    data: list[KDataNode] = []
    for index, fact in enumerate(facts):
        for storage in fact.storages:
            names = set(storage.names)
            readers = [f"fwd_{i}" for i, n in enumerate(sg.nodes) if names & set(n.inputs)]
            readers += [
                f"bwd_{i}" for i, f in enumerate(facts) if f.wants_grad and names & set(f.saved)
            ]
            data.append(
                KDataNode(
                    storage.names[0], "data", storage.size_bytes, (f"fwd_{index}",), tuple(readers)
                )
            )
            wanting = [name for name in storage.names if name in grad_names]
            if wanting:
                makers = [
                    f"bwd_{i}"
                    for i, n in enumerate(sg.nodes)
                    if facts[i].wants_grad and set(wanting) & set(n.inputs)
                ]
                size = sum(infos[name].size_bytes for name in wanting)
                data.append(
                    KDataNode(
                        f"{storage.names[0]}.grad", "grad", size, tuple(makers), (f"bwd_{index}",)
                    )
                )
        if fact.phantom_bytes:
            data.append(
                KDataNode(
                    f"phantoms of fwd_{index}",
                    "phantom",
                    fact.phantom_bytes,
                    (f"fwd_{index}",),
                    (f"bwd_{index}",),
                )
            )
    return KGraph(tuple(compute), tuple(data))


def _forward(
    sg: SimplifiedGraph,
    index: int,
    fact: NodeFacts,
    key: str,
    sizes: Mapping[str, tuple[str, int]],  # value -> its storage and the storage's bytes
) -> KComputeNode:
    node, infos = sg.nodes[index], sg.dataflow.infos
    # What a piece reads from before it has no storage here; the size of the value stands in.
    saved = dict(sizes.get(n, (infos[n].alias_of, infos[n].size_bytes)) for n in fact.saved)
    flowing = {sg.producer[name] for name in node.inputs if name in sg.producer}
    return replace(
        _computation(sg, index, "fwd", fact, key),
        output_bytes=sum(storage.size_bytes for storage in fact.storages),
        saved_bytes=sum(saved.values()) + fact.phantom_bytes,
        after=tuple(f"fwd_{dep}" for dep in node.deps if dep not in flowing),
    )


def _computation(
    sg: SimplifiedGraph, index: int, kind: Literal["fwd", "bwd"], fact: NodeFacts, key: str
) -> KComputeNode:
    """Return one side of a node: what forward and backward say alike."""
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


def print_K_graph(
    kg: KGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw one forward-backward graph into a file; see `rkgb.print_graph`."""
    from rkgb.render import print_graph

    return print_graph(kg, name, open, render_format)


def print_K_graph_list(
    list_kg: Sequence[KGraph],
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw the graphs of a list of pieces into a file; see `rkgb.print_graph`."""
    from rkgb.render import print_graph

    return print_graph(list_kg, name, open, render_format)
