"""A recorded module with the costs of its nodes: the input of planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rkgb.costs import Measured, NodeFacts, measure_resized, op_key
from rkgb.elements import InputMutation, target_of
from rkgb.engine import Sample, device_of, external_values, measure, node_facts, operations
from rkgb.graphs import BasicGraph, SimplifiedGraph
from rkgb.run import RunnableGraph, movable_roots, runs_once
from rockmate.networks.network_problem import problem_of
from rockmate.networks.offload import Offload, offload_of, with_link
from rockmate.problems.problem import Problem
from rockmate.progress import Phases
from rockmate.schedules.plan import OpaquePiece
from rockmate.settings import Terms
from rockmate.whole_step.memory import Coming

if TYPE_CHECKING:  # each of the two may be taken out of rkgb
    from rkgb.compiled import CompiledGraph
    from rkgb.rows import CutGraph


@dataclass(frozen=True)
class Network:
    """A recorded module, the costs of its nodes, and the resulting problem."""

    recorded: RunnableGraph
    graph: SimplifiedGraph
    measured: Measured
    facts: tuple[NodeFacts, ...]
    problem: Problem  # in blocks of the allocator
    asked: Problem  # in requested bytes
    fixed: frozenset[int] = frozenset()  # must-save nodes: a recomputation would have other bits
    compiled: CompiledGraph | None = None  # if it has compiled pieces
    kept: frozenset[int] = frozenset()  # compiled nodes that save more for their backward
    rebuilding: Network | None = None  # the same network in which none does
    cut: CutGraph | None = None  # if it has parts in pieces of rows
    offload: Offload | None = None  # where storages may be moved
    coming: Coming | None = None  # gradients that the backward allocates, and the budget includes

    @property
    def basic(self) -> BasicGraph:
        """The recorded step."""
        return self.graph.basic

    @property
    def has_pieces(self) -> bool:
        """Whether it has compiled parts, or parts in pieces of rows."""
        return self.compiled is not None or self.cut is not None

    @property
    def is_rounded(self) -> bool:
        """Whether results equal eager's only up to rounding."""
        return self.compiled is not None or (self.cut is not None and not self.cut.how.is_exact)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Paths of submodules that are opaque calls."""
        return self.basic.opaque

    @property
    def pieces(self) -> tuple[OpaquePiece, ...]:
        """Memory and time on the sample of each opaque call."""
        return tuple(
            OpaquePiece(whole.path, whole.kind, whole.held_bytes, whole.time_ms[0])
            for whole in self.basic.whole_calls
            if whole.function is None
        )


def network_of(
    model: nn.Module,
    recorded: RunnableGraph,
    sample: Sample,
    settings: Terms,
    phases: Phases,
    *,
    like: tuple[Measured, SimplifiedGraph] | None = None,
    compiled: CompiledGraph | None = None,
) -> Network:
    """Measure a recording and make its problem; `like` is a network at other sizes.

    `compiled` is the recording with compiled pieces, if there are any.
    """
    graph = recorded.graph
    basic = graph.basic
    external = external_values(basic, model, sample.leaves)
    ops = operations(graph)
    with phases.phase("measurement"):
        if like is None:
            measured = measure(basic, ops, external, times=settings.cost == "measured")
        else:
            known, old = like
            measured = measure_resized(*(basic, ops, external, known), operations(old), old.infos)
        if settings.cost == "flops":
            measured = measured.by_flops(basic, ops)
    with phases.phase("calibration"):
        place = settings.offload, basic.device, settings.host_bytes, settings.link
        return assembled(
            *(graph, recorded, measured, external, compiled, settings.coming), offload_of(*place)
        )


def assembled(
    graph: SimplifiedGraph,
    recorded: RunnableGraph,
    measured: Measured,
    external: Mapping[str, Tensor],
    compiled: CompiledGraph | None = None,
    coming: Coming | None = None,
    offload: Offload | None = None,
) -> Network:
    """Return the network of a recording with measured kinds of operation."""
    facts = node_facts(graph, measured.costs)
    fixed = _unsteady_nodes(graph, measured) | _readers_of_written(graph) | _runs_once(graph)
    fixed |= _written_by_backwards(graph, facts)
    problem = asked = problem_of(graph, facts, external, fixed=fixed, coming=coming)
    if device_of(graph.basic.device).block_bytes(1) > 1:
        plain = node_facts(graph, measured.costs, in_blocks=False)
        asked = problem_of(graph, plain, external, in_blocks=False, fixed=fixed, coming=coming)
    if offload is not None:
        movable = movable_roots(graph)
        problem, asked = (with_link(one, movable, offload.link) for one in (problem, asked))
    own = (recorded, graph, measured, facts, problem, asked, fixed, compiled)
    return Network(*own, coming=coming, offload=offload)


def _unsteady_nodes(graph: SimplifiedGraph, measured: Measured) -> frozenset[int]:
    infos, unsteady = graph.infos, measured.unsteady
    return frozenset(
        index
        for index, node in enumerate(graph.nodes)
        if unsteady and any(op_key(op, infos) in unsteady for op in node.ops)
    )


def _readers_of_written(graph: SimplifiedGraph) -> frozenset[int]:
    """Return the nodes that read memory to which the step writes, and of which no copy is kept.

    Arguments are left out, because they are written at the end of the step.
    """
    basic, infos = graph.basic, graph.infos
    written = {basic.inputs[e.place] for e in basic.effects if isinstance(e, InputMutation)}
    return frozenset(
        index
        for index, node in enumerate(graph.nodes)
        if runs_once(graph, node)
        or any(infos[name].alias_of in written for op in node.ops for name in op.inputs)
    )


def _written_by_backwards(graph: SimplifiedGraph, facts: Sequence[NodeFacts]) -> frozenset[int]:
    """Return the nodes that make or read memory to which a backward writes before its last read.

    After that write, a recomputed maker would restore the old content, and a reader would get the
    new one.
    """
    written = graph.uses_behind.writes
    found: set[int] = set()
    for index, fact in enumerate(facts):
        for storage in fact.storages:
            writer = written[storage.root][0].part if storage.root in written else index
            found.update(user for user in storage.fwd_users if user < writer)
            if min(storage.bwd_users, default=writer) < writer:
                found.add(index)
    return frozenset(found)


def _runs_once(graph: SimplifiedGraph) -> frozenset[int]:
    """Return the nodes with opaque calls that change or consume outside state."""
    wholes = ([target_of(op).whole for op in node.ops] for node in graph.nodes)
    return frozenset(
        index
        for index, own in enumerate(wholes)
        if any(whole is not None and whole.runs_once for whole in own)
    )


def unsteady(network: Network) -> dict[Any, str]:
    """Return the nondeterministic operations in order, in words."""
    infos, kinds = network.graph.infos, network.measured.unsteady
    found: dict[Any, str] = {}
    for op in operations(network.graph):
        if op_key(op, infos) in kinds:
            where = f"{op.target_name} ({op.module_path or '(root)'}, {op.source})"
            found.setdefault(op.target, where)
    return found
