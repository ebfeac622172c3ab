"""Tests whether operations on pieces of rows give the bits of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rkgb.costs.op_costs import op_key
from rkgb.device.rng import RngState
from rkgb.elements.op import Op, map_refs
from rkgb.elements.tensor_info import same_values
from rkgb.graphs.basic import BasicGraph
from rkgb.rows.cuts import Cuts, piece_of
from rkgb.rows.pieces import Slice
from rkgb.run.stand_ins import Drawn, StandIns
from rkgb.torch_api.torch_private import straight_to_kernels


@dataclass
class BitsOfPieces:
    """Tests each kind of operation on random numbers, once for each number of pieces.

    A kernel's order of additions depends on its number of rows. So a product may have the same bits
    in pieces of 256 rows, but not in pieces of 128.
    """

    basic: BasicGraph
    external: Mapping[str, Tensor]
    _known: dict[Any, bool] = field(default_factory=dict)

    def __call__(
        self,
        recorded: Op,
        run: Op,
        read: Mapping[str, Slice],
        made: Sequence[Cuts | None],
        count: int,
    ) -> bool:
        cuts = tuple(s.cuts for s in read.values())
        key = (op_key(recorded, self.basic.infos), run.target, cuts, tuple(made), count)
        if key not in self._known:
            stream = RngState.save(self.basic.device)
            try:
                with torch.no_grad(), straight_to_kernels():
                    self._known[key] = self._are_same(recorded, run, read, made, count)
            finally:
                stream.restore()
        return self._known[key]

    def _are_same(
        self,
        recorded: Op,
        run: Op,
        read: Mapping[str, Slice],
        made: Sequence[Cuts | None],
        count: int,
    ) -> bool:
        basic = self.basic
        values = StandIns(basic.infos, basic.device, self.external, drawn=Drawn())
        whole = _results(recorded, {name: values[name] for name in recorded.inputs})
        for index in range(count):
            pieces = {name: _piece(values[s.source], s.cuts, index) for name, s in read.items()}
            for ours, theirs, cut in zip(_results(run, pieces), whole, made, strict=True):
                if ours is not None and theirs is not None:
                    assert cut is not None
                    if not same_values(ours, piece_of(theirs, cut, index)):
                        return False
        return True


def _piece(tensor: Tensor, cuts: Cuts, index: int) -> Tensor:
    # Most pieces are made in the loop, in separate memory.
    return piece_of(tensor, cuts, index).contiguous() if cuts else tensor


def _results(op: Op, values: Mapping[str, Tensor]) -> Sequence[Tensor | None]:
    target = getattr(op.target, "_op", op.target)
    args = map_refs(op.args, values.__getitem__)
    made = target(*args, **map_refs(dict(op.kwargs), values.__getitem__))
    return made if op.returns_many else (made,)
