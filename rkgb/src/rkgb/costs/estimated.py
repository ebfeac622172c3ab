"""Estimates what each kind of operation costs: time by FLOPs, workspace by a call if it is small.

Only the kernel itself knows its workspace, so each kind that is small enough is called once on
stand-ins. The others are assumed to need none, and listed. Recorded costs give both.

The peak of a plain PyTorch step follows from the bytes held after each of its operations. Plain
PyTorch holds whatever Python and autograd refer to: more than a program that frees each value after
its last use. Added are the workspace of the running kernel, the gradient that the backward starts
from, and the first part of a gradient that waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from rkgb.costs.measure import measure
from rkgb.costs.op_costs import FlopCost, count_flops, kinds_of, made_bytes, named, op_key
from rkgb.elements.op import Op
from rkgb.elements.target import OpCost, target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.basic import BasicGraph

# Limits of one call, and of all calls together: about a second of a slow core.
_MOST_FLOPS, _MOST_BYTES = 2 * 10**9, 256 << 20
_MOST_FLOPS_TOGETHER = 5 * 10**9


@dataclass(frozen=True)
class EstimatedCosts:
    """Costs by kind, in the units of `FlopCost` or as recorded, and the gaps in them."""

    costs: Mapping[str, OpCost]
    uncalled: tuple[str, ...] = ()  # names of operations whose workspace is not known
    missing: tuple[str, ...] = ()  # operations that the recorded costs lack, in words
    missing_share: float = 0.0  # of the work of a step, in FLOPs and bytes moved


def estimate_costs(
    basic: BasicGraph, ops: Sequence[Op], source: FlopCost | None = None
) -> EstimatedCosts:
    """Return the estimated cost of each kind among `ops`; `source` weighs FLOPs and bytes."""
    source, infos = source or FlopCost(), basic.infos
    kinds = kinds_of(basic, ops)
    # Some kernels save tensors whose size is known only after the call.
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
    held = {key: _beside(op, infos) for key, op in kinds.items() if key not in measured}
    costs = {
        key: replace(
            measured.get(key, OpCost(0.0, flops[key], held.get(key) or 0)),
            time_ms=source.time_ms(op, infos),
        )
        for key, op in kinds.items()
    }
    uncalled = [
        kinds[key].target_name
        for key, size in held.items()
        if size is None and (flops[key] or key in blind)
    ]
    return EstimatedCosts(costs, tuple(dict.fromkeys(uncalled)))


def _beside(op: Op, infos: Mapping[str, TensorInfo]) -> int | None:
    """Return the workspace of an operation that says what it holds; None for any other."""
    target = target_of(op)
    peak_bytes = target.inner_bytes([infos[name].empty("meta") for name in op.inputs])
    if peak_bytes is None:
        return None
    beside = peak_bytes - made_bytes(op, infos)
    return beside if target.frees else max(0, beside)  # as measured


def estimate_as_recorded(
    basic: BasicGraph,
    ops: Sequence[Op],
    known: Callable[[str], OpCost | None],
    original: BasicGraph,
) -> EstimatedCosts:
    """Return the costs that `known` has for each kind among `ops`; others are in proportion.

    `ops` are those of a generated program, in which some operations overwrite their inputs. If
    such a kind is not known, it costs what the operation of its name in the `original` recording
    does. A few kinds may be missing because their strides were predicted wrongly.
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
        else:  # a view that only a program makes, so none was recorded
            costs[key] = OpCost(0.0)
    source, infos = FlopCost(), basic.infos
    work = {key: source.time_ms(op, infos) for key, op in kinds.items()}
    recorded_ms = sum(cost.time_ms for cost in costs.values())
    pace = recorded_ms / (sum(work[key] for key in costs) or 1.0)
    guessed = estimate_costs(basic, list(missing.values()))
    for key in missing:
        costs[key] = replace(guessed.costs[key], time_ms=pace * work[key])
    return EstimatedCosts(
        costs,
        guessed.uncalled,
        tuple(map(named, missing.values())),
        sum(work[key] for key in missing) / (sum(work.values()) or 1.0),
    )


def plain_peak_bytes(
    basic: BasicGraph,
    held_bytes: Mapping[str, int],
    costs: Mapping[str, OpCost],
    external: Mapping[str, Tensor],
) -> int:
    """Return the peak in bytes above what is resident.

    `held_bytes` has the bytes after each operation, by its name. `external` identifies leaves that
    are one tensor, and parameters.
    """
    infos = basic.infos
    ops = (*basic.ops, *basic.backward)
    extra = [0] * len(ops)
    made = {name: place for place, op in enumerate(ops) for name in op.results}
    first = len(basic.ops)
    for name in basic.tangent_names:
        if name is None:
            continue
        readers = [place for place, op in enumerate(ops) if name in op.inputs]
        # The gradient of a loss is held to the end, that of an output the loss reads until its use.
        last = len(ops) - 1 if not infos[name].shape else max(readers, default=first - 1)
        _add(extra, first, last, infos[name].counted_bytes)
    for op in basic.cuts:  # what comes from outside waits for the parts
        if op.target.from_outside:  # type: ignore[attr-defined]
            _add(extra, first, ops.index(op) - 1, infos[op.name].counted_bytes)
    parts: dict[int, list[int]] = {}
    leaves: dict[int, Tensor] = {}
    for hand_over in basic.hand_overs:
        leaf = external[hand_over.leaf]
        if infos[hand_over.leaf].is_on_host:
            continue
        leaves[id(leaf)] = leaf
        parts.setdefault(id(leaf), []).append(made.get(hand_over.value, first))
    for key, places in parts.items():
        leaf = leaves[key]
        end = max(places) if isinstance(leaf, nn.Parameter) else len(ops) - 1
        _add(extra, min(places) + 1, end, leaf.numel() * leaf.element_size())
    held = [held_bytes.get(op.name, 0) for op in ops]
    # Autograd adds the parts of a gradient into new memory, after the last part's maker has freed
    # its own.
    sums: dict[int, int] = {}
    for key, places in parts.items():
        size = leaves[key].numel() * leaves[key].element_size()
        for place in sorted(places)[1:]:
            sums[place] = max(sums.get(place, 0), 3 * size)
    unknown = OpCost(0.0)
    peak = 0
    for place, op in enumerate(ops):
        workspace = costs.get(op_key(op, infos), unknown).workspace_bytes
        peak = max(peak, held[place] + extra[place] + workspace)
        if place in sums and place + 1 < len(ops):
            before_next = held[place + 1] - made_bytes(ops[place + 1], infos)
            peak = max(peak, before_next + sums[place])
        elif place in sums:
            peak = max(peak, sums[place])
    return peak


def _add(extra: list[int], first: int, last: int, size: int) -> None:
    for place in range(first, last + 1):
        extra[place] += size
