"""Tests whether operations on pieces of rows give the bits of the whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rkgb.costs.op_costs import op_key
from rkgb.device.rng import drawing_nothing
from rkgb.elements.op import Op, run_op
from rkgb.elements.tensor_info import TensorInfo, same_values
from rkgb.graphs.basic import BasicGraph
from rkgb.rows.cuts import Cuts, Runs, Slice, piece_of
from rkgb.run.stand_ins import Drawn, StandIns
from rkgb.torch_api.private.autograd import straight_to_kernels


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
        each: Sequence[Op],
        read: Mapping[str, Slice],
        made: Sequence[Cuts | None],
        runs: Runs,
        infos: Mapping[str, TensorInfo],
    ) -> bool:
        """Return whether the operations on each piece give what `recorded` gives.

        They `read` pieces of these values by name, and their results are cut as `made` says.
        """
        cuts = tuple(s.cuts for s in read.values())
        how = (each[0].target, cuts, tuple(made), len(each), runs)
        key = (op_key(recorded, infos), how)

        def compared() -> Iterator[bool]:
            """Yield for each result of each piece whether its bits are those of the whole."""
            values = StandIns(infos, self.basic.device, self.external, drawn=Drawn())
            whole = {name: values[name] for name in recorded.inputs}
            run_op(recorded, whole, recorded.kernel)
            for index, run in enumerate(each):
                ours = {n: _piece(values[s.source], s.cuts, index, runs) for n, s in read.items()}
                run_op(run, ours, run.kernel)
                for own, theirs, cut in zip(run.results, recorded.results, made, strict=True):
                    if own and theirs:
                        part = piece_of(whole[theirs], cut or (), index, runs)
                        yield same_values(ours[own], part)

        return self._are_all(key, compared())

    def of_series(self, recorded: Sequence[Op], others: Sequence[Op]) -> bool:
        """Return whether operations make what recorded ones make, with the same bits."""
        infos = self.basic.infos
        ours = (f"{op.target} {op.args}" for op in others)
        key = (*(op_key(op, infos) for op in recorded), *ours)

        def compared() -> Iterator[bool]:
            values = StandIns(infos, self.basic.device, self.external, drawn=Drawn())
            made: list[dict[str, Tensor]] = []
            for ops in (recorded, others):
                given = {name for op in ops for name in op.inputs}
                given -= {name for op in ops for name in op.results}
                made.append({name: values[name] for name in given})
                for op in ops:
                    run_op(op, made[-1], op.kernel)
            whole, parts = made
            for name in {n for op in others for n in op.results} & whole.keys():
                yield same_values(whole[name], parts[name])

        return self._are_all(key, compared())

    def _are_all(self, key: Hashable, compared: Iterator[bool]) -> bool:
        """Return whether all results are the same, which is compared once."""
        if key not in self._known:
            with drawing_nothing(self.basic.device), torch.no_grad(), straight_to_kernels():
                self._known[key] = all(compared)
        return self._known[key]


def _piece(tensor: Tensor, cuts: Cuts, index: int, runs: Runs) -> Tensor:
    # Most pieces are made in the loop, in separate memory.
    return piece_of(tensor, cuts, index, runs).contiguous() if cuts else tensor
