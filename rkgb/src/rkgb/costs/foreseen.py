"""What kinds of operation will cost, foreseen: by FLOPs, and workspaces of small ones by a call.

A kernel's workspace is known to nobody but itself, so each kind that is small enough is called once
on stand-ins. The others are taken to need none, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rkgb.costs.measure import measure
from rkgb.costs.op_costs import FlopCost, OpCost, count_flops, kinds_of, made_bytes
from rkgb.elements.op import Op
from rkgb.graphs.basic import BasicGraph

# Of one call, and of all calls together: about a second of a slow core.
_MOST_FLOPS, _MOST_BYTES = 2 * 10**9, 256 << 20
_MOST_FLOPS_TOGETHER = 5 * 10**9


@dataclass(frozen=True)
class Foreseen:
    """Costs by kind, in the units of `FlopCost`; and the kinds whose workspace is not known."""

    costs: Mapping[str, OpCost]
    uncalled: tuple[str, ...]  # names of operations


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
