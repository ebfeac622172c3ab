"""Costs at other sizes, from measured ones: bytes exactly, times in proportion.

The workspace of each new kind of operation is measured, because the budget is a promise. A time
only decides between plans. It is that of the same operation at the measured size, in proportion to
FLOPs and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from rkgb.costs.estimated import EstimatedCosts, estimate_costs
from rkgb.costs.measure import Measured, measure
from rkgb.costs.op_costs import FlopCost, kinds_of, made_bytes, named, op_key
from rkgb.elements.op import Op
from rkgb.elements.target import OpCost
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph
from rkgb.torch_api.by_values import takes_by_values
from rkgb.torch_api.private.memory import profiler_is_on


def measure_resized(
    basic: BasicGraph,
    ops: Sequence[Op],
    external: Mapping[str, Tensor],
    known: Measured,
    known_ops: Sequence[Op],
    known_infos: Mapping[str, TensorInfo],
) -> Measured:
    """Return what each kind among `ops` costs, given the costs of the same operations elsewhere.

    `ops` are `known_ops` at other sizes, one by one (see `same_but_for_sizes`). Operations whose
    peak the recording has metered are not run again.
    """
    source = FlopCost()
    first: dict[str, tuple[Op, Op, str]] = {}  # by kind: operation, known operation, known kind
    metered: dict[str, int] = {}
    for op, old in zip(ops, known_ops, strict=True):
        key = op_key(op, basic.infos)
        ran = basic.metered.get(op.name)
        if ran is not None and ran.is_of(op) and not takes_by_values(op.target):
            metered[key] = max(0, ran.peak_bytes - made_bytes(op, basic.infos))
        if key not in first:
            first[key] = op, old, op_key(old, known_infos)
    callees = dict(known.callees)
    for key, (_, _, before) in first.items():
        if before in known.callees:
            callees[key] = known.callees[before]
    new = [op for key, (op, _, _) in first.items() if key not in known.costs]
    measured = measure(basic, new, external, times=False, callees=callees, workspaces=metered)
    costs: dict[str, OpCost] = {}
    for key, (op, old, before) in first.items():
        if key in known.costs:
            costs[key] = known.costs[key]
            continue
        now_ms, cost = source.time_ms(op, basic.infos), known.costs.get(before)
        share = 1.0 if cost is None else cost.time_ms / source.time_ms(old, known_infos)
        costs[key] = replace(measured.costs[key], time_ms=now_ms * share)
    unsteady = {key for key, (_, _, before) in first.items() if before in known.unsteady}
    return replace(
        measured,
        costs=costs,
        callees={key: callees[key] for key in first if key in callees},
        spread=known.spread,
        unsteady=measured.unsteady | unsteady,
    )


def measure_others(
    basic: BasicGraph, ops: Sequence[Op], external: Mapping[str, Tensor], known: Measured
) -> Measured:
    """Return `known` with the missing kinds among `ops` added; their times are estimated.

    Within a profile, which metering would end, they are taken to need no workspace.
    """
    kinds = {op_key(op, basic.infos): op for op in ops}
    new = {key: op for key, op in kinds.items() if key not in known.costs}
    none = dict.fromkeys(new, 0) if profiler_is_on() else None
    found = measure(basic, list(new.values()), external, times=False, workspaces=none)
    source = FlopCost()
    costs = {
        key: replace(cost, time_ms=source.time_ms(new[key], basic.infos))
        for key, cost in found.costs.items()
    }
    return replace(
        known,
        costs={**known.costs, **costs},
        callees={**known.callees, **found.callees},
        unsteady=known.unsteady | found.unsteady,
    )


def estimate_resized(
    basic: BasicGraph,
    ops: Sequence[Op],
    known: EstimatedCosts,
    known_ops: Sequence[Op],
    known_infos: Mapping[str, TensorInfo],
) -> EstimatedCosts:
    """Return the estimated cost of each kind among `ops`, given `known` costs at another size.

    `known_ops` are the operations of the step at that size. An operation is matched by name and
    kernel; without a match its time is proportional to the rest. Workspaces are estimated.
    """
    source, recorded_ms, work_ms = FlopCost(), 0.0, 0.0
    pace: dict[tuple[str, str], float] = {}
    for op in known_ops:
        found = known.costs[op_key(op, known_infos)].time_ms
        work = source.time_ms(op, known_infos)
        pace[op.name, op.target_name] = found / work
        recorded_ms, work_ms = recorded_ms + found, work_ms + work
    usual = recorded_ms / (work_ms or 1.0)
    estimated, costs, missing = estimate_costs(basic, ops), {}, {}
    for key, op in kinds_of(basic, ops).items():
        cost = estimated.costs[key]
        if (op.name, op.target_name) not in pace:
            missing[key] = op
        now_ms = cost.time_ms * pace.get((op.name, op.target_name), usual)
        costs[key] = replace(cost, time_ms=now_ms)
    lacking = sum(estimated.costs[key].time_ms for key in missing)
    work_ms = sum(cost.time_ms for cost in estimated.costs.values())
    return replace(
        estimated,
        costs=costs,
        missing=tuple(map(named, missing.values())),
        missing_share=lacking / (work_ms or 1.0),
    )
