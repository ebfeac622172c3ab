"""The peak of a plain PyTorch step, from the bytes held after each of its operations.

Plain PyTorch holds whatever Python and autograd refer to: more than a program that frees each value
after its last use. Added are the workspace of the running kernel, the gradient that the backward
starts from, and the first part of a gradient that waits for others.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from rkgb.costs.op_costs import made_bytes, op_key
from rkgb.elements.target import OpCost
from rkgb.graphs.basic import BasicGraph


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
