"""One step recorded without content: its bytes and its problem."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rkgb.capture import SizedStep, record_sizes
from rkgb.costs import EstimatedCosts, plain_peak_bytes
from rkgb.elements import flatten
from rkgb.engine import B_to_D, D_to_S, bind_inputs, node_facts, operations, runnable
from rkgb.graphs import PLANNED_PASSES, BackwardKind, SimplifiedGraph
from rkgb.run import movable_roots
from rockmate.errors import UnsupportedModuleError
from rockmate.estimate.costs_from_file import ByFlops, Costs, InProportion
from rockmate.guards.sharded import refuse_engines
from rockmate.networks.cutting import Cutting
from rockmate.networks.network_problem import problem_of
from rockmate.networks.offload import with_link
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.progress import Phases
from rockmate.runtime.plain import plain
from rockmate.whole_step.optimizers import OptimizerBytes, optimizer_bytes

if TYPE_CHECKING:
    from rkgb.rows import CutGraph

_FLOPS = ByFlops()


@dataclass(frozen=True)
class Sizes:
    """Bytes that training holds between steps, and the problem of one step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer: OptimizerBytes
    buffers_bytes: int
    inputs_bytes: int
    plain_bytes: int  # peak of a plain step above what is resident
    problem: Problem  # times are FLOPs, in units of 10^9, unless costs were recorded
    uncalled: tuple[str, ...]  # operations of unknown workspace
    missing: tuple[str, ...] = ()  # operations without a recorded cost
    cutting: Cutting[Sizes] | None = field(default=None, repr=False, compare=False)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are in use under every budget."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer.state_bytes
            + self.buffers_bytes
            + self.inputs_bytes
        )


@dataclass(frozen=True)
class PricedStep:
    """A step recorded without content, with the estimated cost of each operation."""

    recording: SizedStep
    graph: SimplifiedGraph
    estimated: EstimatedCosts

    def in_proportion(self, words: str) -> InProportion:
        """Return its costs for the same step at other sizes; `words` describe their origin."""
        infos = self.graph.infos
        return InProportion(words, self.estimated, operations(self.graph), infos)


def priced_step(
    model: nn.Module,
    sample: Any,
    kwargs: Mapping[str, Any] | None,
    device: torch.device,
    costs: Costs = _FLOPS,
    phases: Phases | None = None,
) -> PricedStep:
    """Return a step of `model` on `device`, with the given costs.

    Raises:
        UnsupportedModuleError: nothing requires a gradient.
        PlanMismatchError: the costs are for another call.
        rkgb.TraceError: the step cannot be recorded without content; the error says why and where.
    """
    refuse_engines(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModuleError(
            f"no parameter of {type(model).__name__} requires a gradient, so there is no training "
            "to estimate. Set requires_grad."
        )
    phases = phases or Phases({}, show=False)
    with phases.phase("recording"), plain():
        step = record_sizes(model, sample, kwargs, device, BackwardKind.of_losses)
        graph = runnable(D_to_S(B_to_D(step.basic), passes=PLANNED_PASSES)).graph
    basic, ops = graph.basic, operations(graph)
    with phases.phase("costs"):
        estimated = costs.of(basic, ops, step.basic)
    return PricedStep(step, graph, estimated)


def sizes_of(
    model: nn.Module,
    sample: Any,
    kwargs: Mapping[str, Any] | None,
    optimizer: Any,
    device: torch.device,
    costs: Costs = _FLOPS,
    phases: Phases | None = None,
    link: Link | None = None,
    *,
    split: bool = False,
) -> Sizes:
    """Return the bytes of training `model` on `sample` on `device`, and the problem of one step.

    With a link, storages of the step may be moved; with `split`, it may run in pieces of rows.

    Raises:
        UnknownChoiceError: the optimizer is not known.
        UnsupportedModuleError, PlanMismatchError, rkgb.TraceError: see `priced_step`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    keeps = optimizer_bytes(optimizer, trained, device)
    phases = phases or Phases({}, show=False)
    priced = priced_step(model, sample, kwargs, device, costs, phases)
    step, estimated = priced.recording, priced.estimated
    with phases.phase("bytes"):
        facts = node_facts(priced.graph, estimated.costs)
        problem = problem_of(priced.graph, facts, step.external)
        if link is not None:
            problem = with_link(problem, movable_roots(priced.graph), link)
    plain_bytes = plain_peak_bytes(step.basic, step.held_bytes, estimated.costs, step.external)
    leaves = flatten(bind_inputs(sample, kwargs))[0]
    sizes = Sizes(
        parameters_bytes=_bytes(model.parameters()),
        gradients_bytes=_bytes(trained),
        optimizer=keeps,
        buffers_bytes=_bytes(model.buffers()),
        inputs_bytes=_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor)),
        plain_bytes=plain_bytes,
        problem=problem,
        uncalled=estimated.uncalled,
        missing=estimated.missing,
    )
    if not split:
        return sizes

    def in_pieces(cut: CutGraph, _: bool) -> Sizes:
        graph = runnable(cut.graph).graph
        basic = graph.basic
        found = costs.of(basic, operations(graph), step.basic)
        facts = node_facts(graph, found.costs)
        own = problem_of(graph, facts, step.external)
        return replace(sizes, problem=own, uncalled=found.uncalled, missing=found.missing)

    return replace(sizes, cutting=Cutting(sizes, step.basic, in_pieces, times=False))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, each storage once."""
    found: dict[Any, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        key: Any = id(tensor)
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        found[key] = size
    return sum(found.values())
