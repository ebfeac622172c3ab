"""Tensors that stand in for recorded values: as they lay in memory, with contents that are valid.

found = StandIns(basic.infos, basic.device, external)
found["addmm"], found["view"]       # in one storage, if they were recorded so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rkgb.elements.tensor_info import TensorInfo

_DRAWN = 1 << 14  # random numbers that are drawn for one tensor


class StandIns:
    """Makes each value on demand; values that shared a storage share one here.

    What is `external` serves as it is, or as a copy where it is `written` to. `chosen` says how
    many elements of a mask are true, where that decides sizes. Without `random`, floating numbers
    are all the same, which is faster.
    """

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        device: torch.device,
        external: Mapping[str, Tensor],
        written: Collection[str] = (),
        chosen: Mapping[str, int] | None = None,
        *,
        random: bool = True,
    ) -> None:
        self.infos, self.device, self.external = infos, device, external
        self.written, self.chosen = frozenset(written), chosen or {}
        self.random = random
        self._storages: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self._value(name)
        return self._made[name]

    def _value(self, name: str) -> Tensor:
        tensor = self.external.get(name)
        if tensor is not None:
            return tensor.detach().clone() if name in self.written else tensor
        info = self.infos[name]
        if info.alias_of not in self._storages:
            count = info.storage_bytes // info.dtype.itemsize
            device = "cpu" if info.is_on_host else self.device
            made = torch.empty(count, dtype=info.dtype, device=device)
            self._storages[info.alias_of] = _filled(made, self.random)
            made[: self.chosen.get(info.alias_of, 0)] = 1
        whole = self._storages[info.alias_of]
        if whole.dtype != info.dtype:
            whole = _filled(torch.empty_like(whole.view(info.dtype)), self.random)
        shown = whole.as_strided(info.shape, info.stride, info.offset)
        return torch._conj(shown) if info.is_conj else shown


def _filled(tensor: Tensor, random: bool) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.zero_()  # valid as indices
    if not random:
        return tensor.fill_(0.5)
    # Valid as probabilities, roots and logarithms. Drawing numbers takes longer than most
    # operations on them, so a long tensor repeats its first ones.
    done, count = min(_DRAWN, tensor.numel()), tensor.numel()
    tensor[:done].uniform_()
    while done < count:
        more = min(done, count - done)
        tensor[done : done + more].copy_(tensor[:more])
        done += more
    return tensor
