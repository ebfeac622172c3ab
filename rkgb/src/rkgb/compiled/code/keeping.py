"""The other partition of a piece: its forward saves what the backward would otherwise recompute.

It is faster and takes more memory, so the plan chooses for each node. Bits must not depend on that
choice. So both partitions are run on the same values, twice, and the other one is offered only if
all bits of all results and gradients agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rkgb.compiled.code.classes import CompiledClass, NotCompiledError
from rkgb.compiled.pieces.joint import Joint
from rkgb.elements.tensor_info import same_values, storage_id
from rkgb.run.stand_ins import Drawn, StandIns
from rkgb.torch_api.private.autograd import straight_to_kernels


def check_bits(
    joint: Joint, device: torch.device, found: CompiledClass, other: CompiledClass
) -> None:
    """Compare two partitions of a piece.

    Raises:
        NotCompiledError: some bits differ.
    """
    for shift in (0.0, 0.5):  # values of one sign, then of both
        stand_ins = StandIns(joint.infos, device, {}, drawn=Drawn())
        given = [stand_ins[name] for name in (*joint.primals, *joint.tangents)]
        _shifted(given, shift)
        count = len(joint.primals)
        primals, tangents = given[:count], given[count:]
        ours, theirs = (_values(code, joint, primals, tangents) for code in (found, other))
        if not all(map(same_values, ours, theirs)):
            raise NotCompiledError("keeping more gives other bits")


def _values(
    code: CompiledClass, joint: Joint, primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor]:
    """Run a class; return results, statistics and gradients."""
    with torch.no_grad(), straight_to_kernels():
        results = list(code.forward.run([primals[place] for place in code.takes]))
        known = {"primal": primals, "tangent": tangents, "result": results}
        gradients = code.backward.run([known[kind][at] for kind, at in code.takes_back])
    return [*results[: len(joint.results) + 2 * len(joint.statistics)], *gradients]


def _shifted(tensors: Sequence[Tensor], shift: float) -> None:
    storages = {storage_id(t): t for t in tensors if t.is_floating_point()}
    for tensor in storages.values() if shift else ():
        torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage()
        ).sub_(shift)
