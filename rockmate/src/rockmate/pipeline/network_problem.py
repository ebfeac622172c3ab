"""From the facts about a recorded network to the problem that planners solve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from rkgb.costs import NodeFacts
from rkgb.engine import device_of
from rkgb.graphs import SimplifiedGraph
from rockmate.problems.problem import Node, Problem, Storage


def problem_of(
    graph: SimplifiedGraph,
    facts: Sequence[NodeFacts],
    external: Mapping[str, Tensor],
    *,
    in_blocks: bool = True,
    fixed: Collection[int] = (),
) -> Problem:
    """Return the problem of a graph; `external` says which leaves are one, and which parameters.

    `in_blocks` must be as the facts were gathered. What the nodes `fixed` make is kept, since they
    would make something else the next time.
    """
    device = device_of(graph.dataflow.basic.device)
    waiting = _waiting_gradients(graph, external, device.block_bytes if in_blocks else int)
    storages: list[Storage] = []
    nodes: list[Node] = []
    for index, (node, fact) in enumerate(zip(graph.nodes, facts, strict=True)):
        for storage in fact.storages:
            if not storage.is_phantom:
                storages.append(
                    Storage(
                        name=storage.root,
                        size_bytes=storage.size_bytes,
                        producer=index,
                        fwd_users=storage.fwd_users,
                        bwd_users=storage.bwd_users,
                        is_output=storage.is_output or index in fixed,
                    )
                )
        if fact.phantom_bytes:
            storages.append(
                Storage(
                    name=f"phantoms of {node.name}",
                    size_bytes=fact.phantom_bytes,
                    producer=index,
                    bwd_users=(index,),
                    is_phantom=index not in fixed,
                    is_output=index in fixed,
                )
            )
        nodes.append(
            Node(
                name=node.name,
                fwd_time_ms=fact.cost.fwd_time_ms,
                bwd_time_ms=fact.cost.bwd_time_ms,
                has_backward=fact.has_backward,
                fwd_peak_bytes=fact.fwd_peak_bytes,
                fwd_peak_nograd_bytes=fact.fwd_peak_dropping_bytes,
                bwd_peak_bytes=fact.bwd_peak_bytes,
                grads_before_bytes=fact.grads_before_bytes + waiting[index],
                rerun_state_bytes=fact.state_bytes,
                module_path=node.module_path,
                op=node.main.target_name,
                source=node.main.source,
            )
        )
    return Problem(tuple(nodes), tuple(storages))


def _waiting_gradients(
    graph: SimplifiedGraph, external: Mapping[str, Tensor], taken: Callable[[int], int]
) -> list[int]:
    """Return, per node, the bytes of handed-over gradients that wait while its backward runs.

    Autograd sums all gradients of a tied weight before it accumulates them, so the first waits for
    the last; the gradient of an input waits for the end.
    """
    uses: dict[int, tuple[Tensor, list[int]]] = {}
    for index, node in enumerate(graph.nodes):
        for hand_over in node.hand_overs:
            leaf = external[hand_over.leaf]
            uses.setdefault(id(leaf), (leaf, []))[1].append(index)
    waiting = [0] * len(graph.nodes)
    for tensor, nodes in uses.values():
        first = min(nodes) if isinstance(tensor, nn.Parameter) else 0
        for index in range(first, max(nodes)):
            waiting[index] += taken(tensor.numel() * tensor.element_size())
    return waiting
