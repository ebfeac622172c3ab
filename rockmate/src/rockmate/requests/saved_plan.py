"""Saving a planned module, and making it from a file without solver and measurement.

Only the costs of kinds of operation and the steps come from the file. The recording is new. Its
sizes and structure must give exactly the problem that was planned, and the program is generated
again.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from rkgb.costs import Measured, OpCost, choose_callees, op_key
from rkgb.device import no_collection
from rkgb.elements import target_of
from rkgb.engine import external_values, operations
from rkgb.run import RunnableGraph
from rockmate.errors import InvalidPlanError, PlanFileError, PlanMismatchError
from rockmate.files.differences import of_inputs, of_problems
from rockmate.files.plan_file import KindCost, PlanFile, SavedCut, SavedPlan, SeenLoss
from rockmate.networks.cutting import beside
from rockmate.networks.network import Network, assembled
from rockmate.networks.offload import Offload, offload_of
from rockmate.networks.planned import Planned, compiled_plan
from rockmate.networks.self_test import eager_step, over_budget
from rockmate.requests.identity import (
    elsewhere,
    input_texts,
    kind_digest,
    made_with,
    recording_digest,
)
from rockmate.requests.request import Request, lowered, tested
from rockmate.schedules.baselines import keeping_all_bytes
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.report import exact_bytes
from rockmate.schedules.simulate import simulate
from rockmate.settings import Terms, parse_budget

if TYPE_CHECKING:
    from rkgb.rows import Cut


def saved_of(planned: Planned) -> SavedPlan:
    """Return a planned call in the form for a file."""
    network, plan, recorded = planned.network, planned.plan, planned.network.recorded
    basic, measured = network.basic, network.measured
    cut = whole_ms = None
    if network.cut is not None:
        cut, whole_ms = saved_cut(network.cut.how), plan.base_time_ms
        plan = make_plan(network.problem, plan.steps, plan.budget_bytes, plan.planner)
        recorded = lowered(network.cut.merged.basic)
    infos = basic.infos
    keys = dict.fromkeys(op_key(op, infos) for op in operations(network.graph))
    own = {key: measured.costs[key] for key in keys if key in measured.callees}  # no pieces
    return SavedPlan(
        recording=recording_digest(recorded),
        inputs=input_texts(basic),
        problem=network.problem,
        plan=plan,
        costs={
            kind_digest(key): KindCost(cost.time_ms, cost.flops, cost.workspace_bytes)
            for key, cost in own.items()
        },
        unsteady=tuple(sorted(kind_digest(key) for key in measured.unsteady)),
        spread=measured.spread,
        device_ms=measured.device_ms,
        host_ms=measured.host_ms,
        budget_bytes=planned.budget_bytes,
        blocks_bytes=planned.blocks_bytes,
        eager_peak_bytes=planned.eager_peak_bytes,
        measured_peak_bytes=planned.measured_peak_bytes,
        comparison=planned.comparison,
        pieces=network.pieces,
        cut=cut,
        whole_ms=whole_ms,
    )


def plan_file_of(plans: list[Planned], model: nn.Module, loss: SeenLoss | None = None) -> PlanFile:
    """Return the file of some plans of one model, each recording once.

    Raises:
        PlanFileError: pieces of a plan are compiled.
    """
    if any(planned.network.compiled is not None for planned in plans):
        raise PlanFileError(
            "a plan with compiled pieces is not saved: a file knows no compiled code. Plan again "
            "with compile=True, which finds inductor's own cache, or save a plan made without"
        )
    found: dict[str, SavedPlan] = {}
    for planned in plans:
        if planned.how != "recorded":  # a recording with another plan's steps is quickly made again
            saved = saved_of(planned)
            found.setdefault(saved.recording, saved)
    device = plans[0].network.basic.device
    return PlanFile(type(model).__name__, made_with(device), tuple(found.values()), loss=loss)


def planned_from(saved: SavedPlan, request: Request) -> Planned:
    """Return the planned module of a saved plan, without another self-test.

    Raises:
        PlanMismatchError: it makes another problem, or does not fit into the budget.
        SelfTestError: the planned module disagreed with eager PyTorch.
    """
    model, given, settings = request.model, request.sample, request.settings
    phases = request.phases
    served = (True, "exact") if saved.cut is None or saved.cut.is_exact else (True,)
    if saved.cut is not None and settings.split not in served:
        kind = "exact pieces" if saved.cut.is_exact else "pieces"
        found = [f"split: {kind} of rows in the file, split={settings.split!r} here"]
        raise _mismatch("call", found)
    if saved.plan.moves and settings.offload is None:
        raise _mismatch("call", ["offload: storages move in the file, offload=None here"])
    with phases.phase("saved plan"):
        network = _network(saved, request, unknown=None)
    if differences := of_problems(saved.problem, network.problem):  # another source may have a plan
        raise _mismatch(type(model).__name__, differences)
    budget_bytes = _budget_for(saved, network, settings)
    with phases.phase("saved plan"):
        plan = _plan_for(saved, network, settings, budget_bytes)
        planned = replace(
            compiled_plan(network, plan, given, budget_bytes, phases),
            eager_peak_bytes=saved.eager_peak_bytes,
            measured_peak_bytes=saved.measured_peak_bytes,
            blocks_bytes=saved.blocks_bytes,
            comparison=saved.comparison,
        )
    if settings.self_test and saved.measured_peak_bytes is None:
        with phases.phase("self_test"), no_collection():
            eager = eager_step(model, given, network, "fingerprints")
        planned, ours = tested(request, eager, planned)
        if ours.allocated_peak_bytes > budget_bytes:
            raise over_budget(planned, model)
    phases.close("a saved plan serves")
    return planned


def not_for(saved: SavedPlan, request: Request) -> PlanMismatchError:
    """Return the error for a plan of another recording, with the differences."""
    found = of_inputs(saved.inputs, input_texts(request.recorded.graph.basic))
    network = _network(saved, request, unknown=OpCost(0.0))
    found += of_problems(saved.problem, network.problem)
    found = found or ["numbers, names or the order of operations in the network"]
    return _mismatch(type(request.model).__name__, found)


def _mismatch(name: str, found: list[str]) -> PlanMismatchError:
    return PlanMismatchError.of_saved(f"this {name}", found)


def refuse_elsewhere(file: PlanFile, request: Request) -> None:
    """Refuse plans that were made with other versions, another device or other kernel flags.

    Raises:
        PlanMismatchError: something differs; the error says what.
    """
    name = type(request.model).__name__
    if found := elsewhere(file, name, request.sample.device):
        raise _mismatch(name, found)


def _network(saved: SavedPlan, request: Request, *, unknown: OpCost | None) -> Network:
    """Return the network of a new recording with the costs of a saved plan."""
    cut, recorded = request.cut(cut_of(saved.cut))
    basic = recorded.graph.basic
    external = external_values(basic, request.model, request.sample.leaves)
    ops = operations(recorded.graph)
    callees = {} if unknown is not None else choose_callees(basic, ops, external)
    costs, unsteady = _costs(saved, recorded, unknown)
    measured = Measured(
        costs, callees, saved.spread, saved.device_ms, saved.host_ms, frozenset(unsteady)
    )
    made = assembled(
        *(recorded.graph, recorded, measured, external),
        coming=request.settings.coming,
        offload=_offload(saved, request),
    )
    return replace(made, cut=cut)


def _offload(saved: SavedPlan, request: Request) -> Offload | None:
    """Return the place for what moves, with the rates for which the plan was made."""
    link, settings = saved.problem.link, request.settings
    if link is None:
        return None
    return offload_of(settings.offload, request.sample.device, settings.host_bytes, link)


def saved_cut(how: Any) -> SavedCut | None:
    """Return how something is cut in the form for a file."""
    return None if how is None else SavedCut(**asdict(how))


def cut_of(saved: SavedCut | None) -> Cut | None:
    """Return how something is cut, from a file."""
    if saved is None:
        return None
    from rkgb.rows import Cut

    return Cut(**asdict(saved))


def _costs(
    saved: SavedPlan, recorded: RunnableGraph, unknown: OpCost | None
) -> tuple[dict[str, OpCost], set[str]]:
    """Return costs of every kind, and nondeterministic kinds; `unknown` is for missing ones."""
    infos = recorded.graph.infos
    kinds = {op_key(op, infos): op for op in operations(recorded.graph)}
    costs: dict[str, OpCost] = {}
    unsteady = set()
    for key, op in kinds.items():
        given = target_of(op).cost(op)
        row = saved.costs.get(kind_digest(key))
        if given is not None:
            costs[key] = given
        elif row is not None:
            costs[key] = OpCost(row.time_ms, row.flops, row.workspace_bytes)
        elif unknown is not None:
            costs[key] = unknown
        else:
            raise PlanMismatchError(
                f"the saved plan has no cost for '{op.target_name}' ({op.module_path or 'root'}, "
                f"{op.source}): it was made for another network. Plan anew",
                [f"no cost of {op.target_name}"],
            )
        if kind_digest(key) in saved.unsteady:
            unsteady.add(key)
    return costs, unsteady


def _budget_for(saved: SavedPlan, network: Network, settings: Terms) -> int:
    """Return the budget in bytes; a fraction is resolved as when the plan was made.

    Raises:
        PlanMismatchError: the plan with reserve and blocks does not fit into it.
    """
    budget_bytes, fraction = parse_budget(settings.budget)
    if budget_bytes is None:
        assert fraction is not None
        whole = saved.eager_peak_bytes
        if whole is None:
            whole = keeping_all_bytes(network.problem)
        budget_bytes = int(fraction * whole)
    aside = settings.reserve + saved.blocks_bytes
    try:
        needed = simulate(network.problem, saved.plan.steps, saved.plan.moves).peak_bytes + aside
    except InvalidPlanError as error:  # less may move here
        raise _mismatch("offload", [str(error)]) from None
    if needed > budget_bytes:
        found = [
            f"it needs {exact_bytes(needed)}, {aside} of them set aside, and the "
            f"budget is {exact_bytes(budget_bytes)}"
        ]
        raise _mismatch("budget", found)
    return budget_bytes


def _plan_for(saved: SavedPlan, network: Network, settings: Terms, budget_bytes: int) -> Plan:
    """Return the saved plan for this budget, without a bound that was for a smaller one."""
    within = budget_bytes - settings.reserve - saved.blocks_bytes
    plan, problem = saved.plan, network.problem
    here = plan.with_steps(problem, plan.steps, plan.moves)
    bound_ms = plan.bound_ms if within <= plan.budget_bytes else None
    proven = here.overhead_ms == 0
    here = replace(
        here,
        budget_bytes=within,
        base_time_ms=problem.base_time_ms,
        bound_ms=problem.base_time_ms if proven else bound_ms,
        status=plan.status if bound_ms is not None else "optimal" if proven else "feasible",
    )
    return here if saved.whole_ms is None else beside(here, saved.whole_ms)
