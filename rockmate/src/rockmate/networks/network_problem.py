"""From the facts of a recorded network to the problem that planners solve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from rkgb.costs import NodeFacts
from rkgb.elements import TensorInfo
from rkgb.engine import device_of
from rkgb.graphs import SimplifiedGraph, SimplifiedNode
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.whole_step.memory import Coming

_TRANSPOSED = 60 * 60  # elements of a block in which torch transposes
_SPARSE = "_sparse_coo_tensor_with_dims_and_tensors"  # joins indices and values


def problem_of(
    graph: SimplifiedGraph,
    facts: Sequence[NodeFacts],
    external: Mapping[str, Tensor],
    *,
    in_blocks: bool = True,
    fixed: Collection[int] = (),
    coming: Coming | None = None,
) -> Problem:
    """Return the problem of a graph; `external` identifies equal leaves and parameters.

    `in_blocks` must be that of the facts. The results of `fixed` nodes must be saved, because a
    recomputation would give other bits. Gradients of parameters count only if the backward
    allocates them (`coming`). Otherwise they exist before the step.
    """
    device = device_of(graph.basic.device)
    taken = device.block_bytes if in_blocks else int
    waiting = _waiting_gradients(graph, external, taken, coming)
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
    graph: SimplifiedGraph,
    external: Mapping[str, Tensor],
    taken: Callable[[int], int],
    coming: Coming | None,
) -> list[int]:
    """Return for each node the bytes of gradients that wait in autograd during its backward.

    Autograd sums all gradients of a tied weight before it accumulates them, so the first waits for
    the last, or for the end if a use comes later that this backward does not reach. The gradient
    of an input waits for the end. So do `coming` gradients of parameters, which are there beside
    their copies for a moment where autograd copies them.
    """
    uses: dict[int, tuple[Tensor, list[tuple[int, TensorInfo]]]] = {}
    waits = {id(external[leaf]) for leaf in _unreached_later(graph)}
    for index, node in enumerate(graph.nodes):
        for hand_over in node.hand_overs:
            leaf = external[hand_over.leaf]
            if graph.infos[hand_over.leaf].is_on_host:
                continue
            part = index, graph.infos[hand_over.value]
            uses.setdefault(id(leaf), (leaf, []))[1].append(part)
    come = coming is not None and coming.gradients
    waiting = [0 if coming is None or come else coming.size_bytes] * len(graph.nodes)
    kept: dict[str | int, tuple[int, int]] = {}  # by storage: the node after which, and bytes
    for tensor, parts in uses.values():
        first, last = parts[-1][0], parts[0][0]
        size_bytes, storage = taken(tensor.numel() * tensor.element_size()), parts[-1][1]
        waiting[last] += max(_buffer_bytes(tensor, info) for _, info in parts)
        if not isinstance(tensor, nn.Parameter):
            kept[id(tensor)] = first, size_bytes
        elif not come:
            for index in range(0 if id(tensor) in waits else last, first):
                waiting[index] += size_bytes
        elif copies := max(_copies(tensor, info) for _, info in parts):
            waiting[last] += copies * size_bytes
            kept[id(tensor)] = first, size_bytes
        elif storage.storage_bytes <= storage.size_bytes:
            kept[id(tensor)] = first, size_bytes
        else:  # of a view, the whole storage, whoever else keeps it
            before, _ = kept.get(storage.alias_of, (first, 0))
            kept[storage.alias_of] = max(first, before), taken(storage.storage_bytes)
    for end, size_bytes in kept.values():
        for index in range(end):
            waiting[index] += size_bytes
    for index, size_bytes in _sparse_sums(graph, external):
        waiting[index] += taken(size_bytes)
    return waiting


def _unreached_later(graph: SimplifiedGraph) -> set[str]:
    """Return the leaves with a use that no gradient comes from, after one that gives its part.

    An output beside a loss may use a parameter that a penalty in the loss reads, too.
    """
    parts = Counter((h.leaf, h.sequence_nr) for node in graph.nodes for h in node.hand_overs)
    given: set[str] = set()
    found: set[str] = set()
    for edge in graph.basic.edges:
        if parts[edge]:
            parts[edge] -= 1
            given.add(edge[0])
        elif edge[0] in given:
            found.add(edge[0])
    return found


def _copies(leaf: Tensor, info: TensorInfo) -> int:
    """Return how often autograd copies a gradient of a leaf that comes like this.

    It copies what has another type, and what has other strides.
    """
    strides = zip(info.shape, info.stride, leaf.stride(), strict=False)
    lies_alike = all(size == 1 or own == its for size, own, its in strides)
    return (info.dtype != leaf.dtype) + (not lies_alike)


def _buffer_bytes(leaf: Tensor, info: TensorInfo) -> int:
    """Return what torch takes on a CPU to copy a gradient that comes transposed."""
    is_transposed = info.stride == (1, info.shape[0]) if len(info.shape) == 2 else False
    is_large = leaf.numel() >= _TRANSPOSED and leaf.device.type == "cpu"
    is_copied = is_transposed and is_large and leaf.is_contiguous()
    return _TRANSPOSED * info.dtype.itemsize if is_copied else 0


def has_sparse_gradients(graph: SimplifiedGraph) -> bool:
    """Whether a gradient comes as indices and values: what is kept of it depends on these."""
    infos = (graph.infos[h.value] for node in graph.nodes for h in node.hand_overs)
    return any(len(info.stride) != len(info.shape) for info in infos)


def _sparse_sums(
    graph: SimplifiedGraph, external: Mapping[str, Tensor]
) -> Iterator[tuple[int, int]]:
    """Return (node, bytes) that sums of sparse gradients take beyond the waiting gradient.

    Autograd concatenates the parts in new memory, one by one. The sum contains every part, so it
    may be larger than the parameter.
    """
    sums: dict[int, int] = {}
    for index in reversed(range(len(graph.nodes))):
        for hand_over in graph.nodes[index].hand_overs:
            leaf = external[hand_over.leaf]
            part = _sparse_bytes(graph, graph.nodes[index], hand_over.value)
            if part or id(leaf) in sums:
                so_far = sums.get(id(leaf), 0)
                sums[id(leaf)] = so_far + (part or leaf.numel() * leaf.element_size())
                if so_far:
                    yield index, so_far + sums[id(leaf)]


def _sparse_bytes(graph: SimplifiedGraph, node: SimplifiedNode, value: str) -> int:
    """Return the bytes of a sparse gradient's values and indices, or 0 if it is dense."""
    info = graph.infos[value]
    if len(info.stride) == len(info.shape):
        return 0
    makers = [op for op in node.backward if value in op.results]
    is_plain = bool(makers) and makers[0].target_name == _SPARSE
    dims = int(makers[0].args[0]) if is_plain else 1  # of an embedding: its rows
    row_bytes = info.dtype.itemsize * math.prod(info.shape[dims:])
    return info.storage_bytes + 8 * dims * (info.storage_bytes // max(1, row_bytes))
