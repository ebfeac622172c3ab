"""A recorded module with what its nodes cost: the facts that planning starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from rkgb.compiled import CompiledGraph
from rkgb.costs import FlopCost, Measured, NodeFacts, OpCost, measure_resized, op_key
from rkgb.elements import InputMutation
from rkgb.engine import Sample, device_of, external_values, measure, node_facts, operations
from rkgb.graphs import SimplifiedGraph
from rkgb.opaque import RunPiece
from rkgb.rows import CutGraph
from rkgb.run import RunnableGraph, runs_once
from rockmate.networks.network_problem import problem_of
from rockmate.problems.problem import Problem
from rockmate.progress import Phases
from rockmate.schedules.opaque_piece import OpaquePiece
from rockmate.settings import Terms


@dataclass(frozen=True)
class Network:
    """A recorded module, what its nodes cost, and the problem that they make."""

    recorded: RunnableGraph
    graph: SimplifiedGraph
    measured: Measured
    facts: tuple[NodeFacts, ...]
    problem: Problem  # in blocks of the allocator
    asked: Problem  # in bytes that are asked of it
    fixed: frozenset[int] = frozenset()  # nodes that are never run again: other bits would come
    compiled: CompiledGraph | None = None  # where pieces of it are
    kept: frozenset[int] = frozenset()  # of these, what keeps more for its backward
    rebuilding: Network | None = None  # the same where nothing does
    cut: CutGraph | None = None  # where parts of it run piece by piece

    @property
    def has_pieces(self) -> bool:
        """Whether parts of it are compiled or cut."""
        return self.compiled is not None or self.cut is not None

    @property
    def is_rounded(self) -> bool:
        """Whether parts of it compute otherwise than eager, so that bits are its up to rounding."""
        return self.compiled is not None or (self.cut is not None and not self.cut.is_exact)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Submodules that are run whole."""
        return self.graph.dataflow.basic.opaque

    @property
    def pieces(self) -> tuple[OpaquePiece, ...]:
        """What was assumed for each call of them."""
        targets = (op.target for op in self.graph.dataflow.basic.ops)
        pieces = (target.piece for target in targets if isinstance(target, RunPiece))
        return tuple(
            OpaquePiece(p.call.path, p.call.kind, p.held_bytes, p.time_ms[0])
            for p in pieces
            if p.call.function is None
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
    """Measure a recording and make the problem of it; `like` is one at other sizes.

    Where pieces of it are `compiled`, so is what is recorded.
    """
    graph = recorded.graph
    basic = graph.dataflow.basic
    external = external_values(basic, model, sample.leaves)
    ops = operations(graph)
    with phases.phase("measurement"):
        if like is None:
            measured = measure(basic, ops, external, times=settings.cost == "measured")
        else:
            known, old = like
            measured = measure_resized(
                *(basic, ops, external, known), operations(old), old.dataflow.infos
            )
        if settings.cost == "flops":
            measured = replace(measured, costs=by_flops(graph, measured))
    with phases.phase("calibration"):
        return assembled(graph, recorded, measured, external, compiled)


def assembled(
    graph: SimplifiedGraph,
    recorded: RunnableGraph,
    measured: Measured,
    external: Mapping[str, Tensor],
    compiled: CompiledGraph | None = None,
) -> Network:
    """Return the network of a recording whose kinds of operation cost so much."""
    facts = node_facts(graph, measured.costs)
    fixed = _unsteady_nodes(graph, measured) | _readers_of_written(graph) | _runs_once(graph)
    fixed |= _written_by_backwards(graph, facts)
    problem = asked = problem_of(graph, facts, external, fixed=fixed)
    if device_of(graph.dataflow.basic.device).block_bytes(1) > 1:
        plain = node_facts(graph, measured.costs, in_blocks=False)
        asked = problem_of(graph, plain, external, in_blocks=False, fixed=fixed)
    return Network(recorded, graph, measured, facts, problem, asked, fixed, compiled)


def _unsteady_nodes(graph: SimplifiedGraph, measured: Measured) -> frozenset[int]:
    infos, unsteady = graph.dataflow.infos, measured.unsteady
    return frozenset(
        index
        for index, node in enumerate(graph.nodes)
        if unsteady and any(op_key(op, infos) in unsteady for op in node.ops)
    )


def _readers_of_written(graph: SimplifiedGraph) -> frozenset[int]:
    """Return the nodes that read what the step writes to, and that no copy of it can serve.

    An argument is written to in the end.
    """
    basic, infos = graph.dataflow.basic, graph.dataflow.infos
    written = {basic.inputs[e.place] for e in basic.effects if isinstance(e, InputMutation)}
    return frozenset(
        index
        for index, node in enumerate(graph.nodes)
        if runs_once(graph, node)
        or any(infos[name].alias_of in written for op in node.ops for name in op.inputs)
    )


def _written_by_backwards(graph: SimplifiedGraph, facts: Sequence[NodeFacts]) -> frozenset[int]:
    """Return the nodes that make or read what a backward writes to while others are to read it.

    Run again after that, they would make what was there before, or read what was not there then.
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
    """Return the nodes with submodules that run whole and change or use up what is outside."""
    targets = ([op.target for op in node.ops] for node in graph.nodes)
    return frozenset(
        index
        for index, own in enumerate(targets)
        if any(isinstance(target, RunPiece) and target.piece.runs_once for target in own)
    )


def first_unsteady(network: Network) -> str:
    """Return the operation that comes first, of those that gave other bits at a second call."""
    infos, unsteady = network.graph.dataflow.infos, network.measured.unsteady
    for op in operations(network.graph):
        if op_key(op, infos) in unsteady:
            return f"{op.target_name} ({op.module_path or '(root)'}, {op.source})"
    return ""


def by_flops(graph: SimplifiedGraph, measured: Measured) -> Mapping[str, OpCost]:
    """Return the costs of the operations of a graph, with times that follow from FLOPs."""
    infos, source = graph.dataflow.infos, FlopCost()
    kinds = {op_key(op, infos): op for op in operations(graph)}
    return {
        key: replace(measured.costs[key], time_ms=source.time_ms(op, infos))
        for key, op in kinds.items()
    }
