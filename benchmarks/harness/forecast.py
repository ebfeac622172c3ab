"""What a run at the papers' sizes will take, said before it starts.

Bytes are counted on PyTorch's `meta` device, which knows shapes and holds no data: what autograd
saves in the forward, and parameters with their gradients. Minutes are a rough guess: the planning,
capturing and compiling that was seen on CPUs, and the steps at a fraction of an old GPU's speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from harness.networks import NETWORKS
from harness.points import Options, Point

FLOPS_PER_SECOND = 5e12  # float32 on the GPU of the papers, a third of its peak
SECONDS_PER_POINT = {"rockmate": 90, "compile": 120, "checkmate": 60}
OTHER_SECONDS = 15


def plain_bytes(network: str, size: str, batch: int) -> tuple[int, int, float]:
    """Return (saved for backward, parameters and gradients, FLOPs of a step) of plain PyTorch."""
    with torch.device("meta"):
        case = NETWORKS[network].case(size, batch)
    saved: dict[int, Tensor] = {}  # by storage; keeps the tensors, so that no address is used twice
    resident = {p.untyped_storage()._cdata for p in case.model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in resident:
            saved.setdefault(storage, tensor)
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
    ):
        case.model(*case.sample)
    activations = sum(t.untyped_storage().nbytes() for t in saved.values())
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    return activations, 2 * parameters, 3.0 * counter.get_total_flops()


def forecast(name: str, points: Sequence[Point], options: Options) -> str:
    """Return what an experiment will take, as text."""
    seconds, most, where = 0.0, 0, ""
    known: dict[tuple[str, int], tuple[int, int, float]] = {}
    for point in points:
        strategy = point.strategy.split()[0]
        seconds += SECONDS_PER_POINT.get(strategy, OTHER_SECONDS)
        if point.network not in NETWORKS:
            continue
        key = (point.network, point.batch)
        if key not in known:
            known[key] = plain_bytes(point.network, point.size, point.batch)
        saved, resident, flops = known[key]
        seconds += 2 * (options.warmup + options.repeats + 4) * flops / FLOPS_PER_SECOND
        # the plain network stands beside the one that is measured
        if saved + 2 * resident > most:
            most, where = saved + 2 * resident, f"{point.network} at batch {point.batch}"
    text = f"{name}: {len(points)} points, very roughly {seconds / 60:.0f} minutes"
    if most:
        text += f"; up to {most / 2**30:.1f} GiB on the GPU ({where})"
    return f"{text}. Interrupt it at will: it continues where it was."
