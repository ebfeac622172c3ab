"""What kinds of operation will cost, foreseen: by FLOPs, and workspaces of small ones by a call.

A kernel's workspace is known to nobody but itself, so each kind that is small enough is called once
on stand-ins. The others are taken to need none, and counted. Costs that were recorded say both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rkgb.costs.measure import measure
from rkgb.costs.op_costs import FlopCost, OpCost, count_flops, kinds_of, made_bytes, named, op_key
from rkgb.elements.op import Op
from rkgb.graphs.basic import BasicGraph

# Of one call, and of all calls together: about a second of a slow core.
_MOST_FLOPS, _MOST_BYTES = 2 * 10**9, 256 << 20
_MOST_FLOPS_TOGETHER = 5 * 10**9


@dataclass(frozen=True)
class Foreseen:
    """Costs by kind, in the units of `FlopCost` or as recorded; and what is not known."""

    costs: Mapping[str, OpCost]
    uncalled: tuple[str, ...] = ()  # names of operations whose workspace is not known
    missing: tuple[str, ...] = ()  # operations that the recorded costs lack, in words
    missing_share: float = 0.0  # of the work of a step, in FLOPs and bytes moved


def foresee(basic: BasicGraph, ops: Sequence[Op]) -> Foreseen:
    """Return what each kind among `ops` will cost."""
    source, infos = FlopCost(), basic.infos
    kinds = kinds_of(basic, ops)
    # Some kernels keep for their backward what has a size only once it was made.
    sizeless = {n for op in ops for n in op.results if n and not infos[n].storage_bytes}
    blind = {key for key, op in kinds.items() if not sizeless.isdisjoint((*op.inputs, *op.results))}
    flops = {key: count_flops(op, infos) for key, op in kinds.items()}
    small: list[Op] = []
    left = _MOST_FLOPS_TOGETHER
    for key in sorted(kinds, key=lambda key: flops[key]):
        op = kinds[key]
        names = dict.fromkeys(name for name in (*op.inputs, *op.results) if name)
        is_small = sum(infos[name].storage_bytes for name in names) <= _MOST_BYTES
        is_view = not op.writes and not made_bytes(op, infos)
        if key in blind or is_view or not is_small:
            continue
        if flops[key] <= min(left, _MOST_FLOPS):
            small.append(op)
            left -= flops[key]
    measured = measure(basic, small, {}, times=False).costs if small else {}
    costs = {
        key: replace(measured.get(key, OpCost(0.0, flops[key])), time_ms=source.time_ms(op, infos))
        for key, op in kinds.items()
    }
    uncalled = [
        op.target_name
        for key, op in kinds.items()
        if key not in measured and (flops[key] or key in blind)
    ]
    return Foreseen(costs, tuple(dict.fromkeys(uncalled)))


def foresee_as_recorded(
    basic: BasicGraph,
    ops: Sequence[Op],
    known: Callable[[str], OpCost | None],
    original: BasicGraph,
) -> Foreseen:
    """Return the costs that `known` has for each kind among `ops`; of others, in proportion.

    `ops` are those of a generated program, some of which write over what they read; such a kind
    costs what the operation of that name in the `original` recording does, if only that is known.
    A few kinds may be missing because their strides could not be foreseen as they are.
    """
    before = {op.name: op for op in (*original.ops, *original.backward)}
    kinds = kinds_of(basic, ops)
    costs: dict[str, OpCost] = {}
    missing: dict[str, Op] = {}
    for key, op in kinds.items():
        cost = known(key)
        if cost is None and op.name in before:
            cost = known(op_key(before[op.name], original.infos))
        if cost is not None:
            costs[key] = cost
        elif op.writes or made_bytes(op, basic.infos):
            missing[key] = op
        else:  # views that only a program makes stand in no recording
            costs[key] = OpCost(0.0)
    source, infos = FlopCost(), basic.infos
    work = {key: source.time_ms(op, infos) for key, op in kinds.items()}
    recorded_ms = sum(cost.time_ms for cost in costs.values())
    pace = recorded_ms / (sum(work[key] for key in costs) or 1.0)
    guessed = foresee(basic, list(missing.values()))
    for key in missing:
        costs[key] = replace(guessed.costs[key], time_ms=pace * work[key])
    return Foreseen(
        costs,
        guessed.uncalled,
        tuple(map(named, missing.values())),
        sum(work[key] for key in missing) / (sum(work.values()) or 1.0),
    )
