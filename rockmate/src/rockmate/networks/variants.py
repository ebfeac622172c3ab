"""The program of a plan for kinds of backwards other than the planned one."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rkgb.capture import for_same_numbers, record_other_backward
from rkgb.costs import Measured, measure_others
from rkgb.device import no_collection
from rkgb.engine import (
    device_of,
    external_values,
    measure,
    node_facts,
    operations,
    record,
    runnable,
)
from rkgb.errors import NotByPiecesError
from rkgb.graphs import BackwardKind, BasicGraph, SimplifiedGraph, autocast_as, forward_differences
from rkgb.run import RootMove, held_bytes, without_idle_steps
from rkgb.torch_api import placed_parameters
from rockmate.errors import (
    InfeasibleBudgetError,
    OtherForwardError,
    RockmateError,
    UnsupportedModuleError,
)
from rockmate.guards.input_signature import InputSignature
from rockmate.guards.module_watch import without_hooks
from rockmate.networks.executables import (
    executable,
    spare_bytes_of,
    steps_of,
    timeline_of,
    without_reruns,
)
from rockmate.networks.network import Network, assembled
from rockmate.networks.network_problem import problem_of
from rockmate.problems.problem import Problem
from rockmate.runtime.backwards import Backwards
from rockmate.runtime.executable import Executable
from rockmate.runtime.plain import unseen
from rockmate.schedules.plan import Plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step

_log = logging.getLogger("rockmate")


_STATES = 4  # random states of the CPU that a recording holds

# Makes a plan for a problem within these bytes at its peak and, if given, between its passes; a
# known plan's steps need not fit.
Replan = Callable[[Problem, int, int | None], Plan]


class PlannedFor(Protocol):
    """A plan with its signature and executor."""

    @property
    def network(self) -> Network: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def executor(self) -> Backwards: ...
    @property
    def signature(self) -> InputSignature: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def most_kept_bytes(self) -> int | None: ...
    @property
    def other_gradients(self) -> Replan | None: ...


def variant_of(
    planned: PlannedFor,
    model: nn.Module,
    leaves: Sequence[Any],
    kind: BackwardKind,
    *,
    in_a_step: bool = True,
) -> Executable:
    """Return the executable for another kind of backward, from another recording.

    If a recording on real tensors would not fit beside the step, it is made without content, if
    that is possible.

    Raises:
        UnsupportedModuleError: the module has changed since the forward.
    """
    sample = planned.signature.sample_of(leaves)
    _log.info("recording another backward: %s", kind)
    with (
        autocast_as(planned.signature.autocast),
        unseen(),
        no_collection(),
        contextlib.ExitStack() as stack,
    ):
        bare = without_hooks(model, type(model))
        known = planned.network.basic
        if in_a_step:  # otherwise nothing can have changed
            stack.enter_context(_wanting_as(known, bare))
        is_tight = in_a_step and not fits_into_a_step(planned, kind)
        basic = record_other_backward(bare, sample, known, kind) if is_tight else None
        if basic is None:
            if is_tight:
                _log.warning(
                    "gradients have arrived in a new way, and their backward has to be recorded on "
                    "real tensors: this step may take about %d bytes, and the budget is %d",
                    *(_recording_bytes(known, kind), planned.budget_bytes),
                )
            basic = record(bare, sample, kind, opaque=known.opaque, known=known)
            # Outside of a step too: what a first forward keeps for later ones is there by now.
            _check_forward(known, basic, leaves)
        basic = basic.with_edges_as(known)
        if known.numbers is not None:
            basic = for_same_numbers(basic, known.numbers, bare, sample, model)
    network, measured = planned.network, planned.network.measured
    if network.has_pieces:
        external = external_values(basic, model, tuple(leaves))
        graph = runnable(_in_pieces(network, basic, external)).graph
    else:
        graph = network.recorded.with_backward(basic)
    if planned.other_gradients is not None:
        return _within_budget(planned, planned.other_gradients, graph, model, leaves)
    like = _hands_over_like(planned, basic.kind)
    if network.has_pieces:
        measured = _measured_within(planned, graph, model, leaves)
    steps, moves = steps_of(network, graph, planned.plan)
    return executable(*(graph, steps, measured), like=like, moves=moves, offload=network.offload)


def _in_pieces(
    network: Network, basic: BasicGraph, external: Mapping[str, Tensor]
) -> SimplifiedGraph:
    """Return the same pieces with the backward of another recording.

    Raises:
        UnsupportedModuleError: parts in pieces of rows cannot be cut for these gradients.
    """
    cut, compiled = network.cut, network.compiled
    try:
        if cut is None:
            assert compiled is not None
            return compiled.with_backward(basic)
        from rkgb.rows import BitsOfPieces

        same = BitsOfPieces(basic, external) if cut.how.is_exact else None
        if compiled is None:
            return cut.with_backward(basic, same).graph
        return compiled.with_backward(basic, lambda merged: cut.in_graph(merged, same).graph)
    except NotByPiecesError as error:
        raise UnsupportedModuleError(
            f"gradients have arrived at outputs of {basic.model_name} in another way than it was "
            f"planned for, and what runs in pieces of rows cannot be cut for them: {error}. "
            "Plan with split=False, or with losses among the outputs only."
        ) from error


@contextlib.contextmanager
def _wanting_as(known: BasicGraph, model: nn.Module) -> Iterator[None]:
    """Restore the forward's requires_grad of parameters; frozen ones still get no gradient."""
    parameters = dict(placed_parameters(model, remove_duplicate=False))
    wanting = {leaf for leaf, _ in known.edges}
    found = [(parameters[path], name in wanting) for name, path in known.parameters.items()]
    changed = [parameter for parameter, wants in found if parameter.requires_grad != wants]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _check_forward(known: BasicGraph, found: BasicGraph, leaves: Sequence[Any]) -> None:
    numbers = () if known.numbers is None else known.numbers.of(leaves) or ()
    if changed := forward_differences(known, found, numbers):
        raise OtherForwardError(
            "gradients have arrived at outputs of a Rockmate module in another way than before, so "
            "that their backward has to be recorded, and the module has changed since its forward: "
            f"{changed[0]}. Change modules (train(), eval(), attributes) after the backward, or "
            "run the forward again.",
            str(changed[0]),
            changed[0].module_path,
        )


def fits_into_a_step(planned: PlannedFor, kind: BackwardKind) -> bool:
    """Return whether another backward can be recorded on real tensors during a step.

    What a forward has saved is beside it, if that forward cannot run again.
    """
    basic = planned.network.basic
    saved_bytes = 0 if planned.executor.planned.can_repeat else planned.plan.peak_bytes
    return _recording_bytes(basic, kind) + saved_bytes <= planned.budget_bytes


def _recording_bytes(known: BasicGraph, kind: BackwardKind) -> int:
    """Return an estimate of the bytes held while another backward is recorded during a step.

    These are outputs and their gradients, of the step and of the recording, the memory of the
    largest nodes, and random states.
    """
    infos = known.infos
    outputs = {infos[name].alias_of: infos[name].counted_bytes for name in known.output_names}
    asked = (root for root, t in zip(known.roots, kind.tangents, strict=True) if t is not None)
    gradients = sum(infos[root].size_bytes for root in asked)
    made = ([n for n in op.results if n] for op in (*known.ops, *known.backward))
    widest = max((sum(infos[n].size_bytes for n in names) for names in made), default=0)
    states = _STATES * device_of(torch.device("cpu")).random_state_bytes
    return 2 * (sum(outputs.values()) + gradients) + 4 * widest + states


def _within_budget(
    planned: PlannedFor,
    replan: Replan,
    graph: SimplifiedGraph,
    model: nn.Module,
    leaves: Sequence[Any],
) -> Executable:
    """Return the program for unexpected gradients; they may need another plan.

    If there is none for gradients of the same outputs in another layout, the step tells what it
    takes, because plain PyTorch takes more for these, too.

    Raises:
        InfeasibleBudgetError: gradients of other outputs have no plan within the budget.
    """
    basic, old = graph.basic, planned.network
    external = external_values(basic, model, tuple(leaves))
    measured = measure_others(basic, operations(graph), external, old.measured)
    network = assembled(
        *(graph, old.recorded, measured, external), coming=old.coming, offload=old.offload
    )
    like = _hands_over_like(planned, basic.kind)
    steps, moves = steps_of(old, graph, planned.plan)  # whose storages its moves count
    lies_otherwise = basic.kind.asks_no_more_than(old.basic.kind)
    is_apart, beyond = not _fits(network, planned, steps, moves, like), ""
    if is_apart and lies_otherwise and not planned.executor.planned.can_repeat:
        is_apart, beyond = False, _told(network, planned, steps, moves)
    as_known = partial(executable, graph, steps, measured, like=like, offload=network.offload)
    instead: Callable[[], Executable] | None = None
    if is_apart and lies_otherwise:
        told = partial(_told, network, planned, steps, moves)
        instead = cache(lambda moves=moves: replace(as_known(moves=moves), beyond=told()))
    less_bytes = 0
    for is_last in (False, True) if is_apart else ():  # then with headroom for waiting gradients
        try:
            room_bytes = planned.plan.budget_bytes - less_bytes
            found = replan(network.problem, room_bytes, planned.most_kept_bytes)
            plan = without_reruns(network, found)
        except InfeasibleBudgetError as error:
            beyond = _told(network, planned, steps, moves, error.minimum_bytes)
            if not (lies_otherwise and beyond):
                raise
            is_apart = False
            break
        steps, moves = steps_of(network, graph, plan)
        if is_last or _fits(network, planned, steps, moves, like):
            break
        assert like is not None, "nothing waits"
        less_bytes = max(held_bytes(graph, steps, like.places))
    made = executable(*(graph, steps, measured), like=like, moves=moves, offload=network.offload)
    instead = instead if is_apart else None
    return replace(made, is_apart=is_apart, beyond=beyond, instead=instead)


def _peak_of(
    network: Network, planned: PlannedFor, steps: Sequence[Step], moves: Sequence[RootMove]
) -> int | None:
    """Return the peak of these steps, or None if a step is missing, or what is moved.

    Steps that hold more between their passes than a plan may take as much more than its budget.
    """
    try:
        timeline = timeline_of(network.problem, steps, moves)
    except (RockmateError, KeyError):
        return None
    if planned.most_kept_bytes is None:
        return timeline.peak_bytes
    kept_bytes = timeline.between_bytes - network.problem.arriving_bytes
    more_bytes = kept_bytes - planned.most_kept_bytes
    return max(timeline.peak_bytes, planned.plan.budget_bytes + more_bytes)


def _told(
    network: Network,
    planned: PlannedFor,
    steps: Sequence[Step],
    moves: Sequence[RootMove],
    minimum_bytes: int = 0,
) -> str:
    """Return what these steps take above the budget, in words; '' if they are none at all."""
    basic, peak_bytes = network.basic, _peak_of(network, planned, steps, moves)
    if peak_bytes is None or peak_bytes <= planned.plan.budget_bytes:  # gradients wait otherwise
        return ""
    names = zip(basic.roots, basic.kind.tangents, strict=True)
    autocast = "; within autocast" if basic.kind.autocast is not None else ""
    strides = ", ".join(f"'{name}' with strides {found}" for name, found in names if found)
    return (
        f"the gradients of {basic.model_name} have arrived in another layout than it was planned "
        f"for ({strides}{autocast}), and their backward takes {peak_bytes} bytes, where the budget "
        f"is {planned.plan.budget_bytes}. Hand back gradients as they were planned for (contiguous "
        "ones, mostly), or raise the budget"
        f"{f' to {max(minimum_bytes, peak_bytes)} bytes' if minimum_bytes else ''}."
    )


def _hands_over_like(planned: PlannedFor, kind: BackwardKind) -> Executable | None:
    """Return an executable with the same places of hand-overs, if there is one.

    In a split backward, gradients of leaves must reach autograd before those of later hidden
    states.
    """
    executor = planned.executor
    if not kind.is_split:
        return executor.planned
    return next((made for found, made in executor.variants.items() if found.is_split), None)


def _fits(
    network: Network,
    planned: PlannedFor,
    steps: Sequence[Step],
    moves: Sequence[RootMove],
    like: Executable | None,
) -> bool:
    """Return whether these steps fit the budget, with waiting gradients as in `like`."""
    peak_bytes = _peak_of(network, planned, steps, moves)
    if peak_bytes is None or peak_bytes > planned.plan.budget_bytes:
        return False
    if like is None:
        return True
    waiting = held_bytes(network.graph, steps, like.places)
    return all(map(operator.le, waiting, spare_bytes_of(network, steps, moves)))


def _measured_within(
    planned: PlannedFor, graph: SimplifiedGraph, model: nn.Module, leaves: Sequence[Any]
) -> Measured:
    """Measure pieces that were compiled for other gradients, and simulate the plan with them.

    Raises:
        InfeasibleBudgetError: they save more, and the plan no longer fits.
    """
    basic = graph.basic
    external = external_values(basic, model, tuple(leaves))
    measured = measure(basic, operations(graph), external, times=False)
    problem = problem_of(graph, node_facts(graph, measured.costs), external)
    steps = without_idle_steps(graph, planned.plan.steps)
    peak = simulate(problem, [Step(*step) for step in steps]).peak_bytes
    if peak > planned.budget_bytes:
        raise InfeasibleBudgetError(
            "the gradients that have arrived lie otherwise in memory than those that were planned "
            f"for, and the pieces that are compiled for them need {peak} bytes with the same plan. "
            "Raise the budget, or hand back gradients as they were (contiguous, at the same "
            "outputs)",
            asked_bytes=planned.budget_bytes,
            minimum_bytes=peak,
        )
    return measured
