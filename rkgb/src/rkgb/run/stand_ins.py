"""Tensors that stand in for recorded values: as they lay in memory, with contents that are valid.

found = StandIns(basic.infos, basic.device, external)
found["addmm"], found["view"]       # in one storage, if they were recorded so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rkgb.elements.tensor_info import TensorInfo

_DRAWN = 1 << 14  # random numbers of which a tensor is made
_APART = 1 << 10  # so many places may lie between the first numbers of two tensors


class Drawn:
    """Random numbers, valid as probabilities, roots and logarithms; drawn once for each type.

    Drawing takes longer than most operations on them: a long tensor repeats its first ones, and
    another tensor has the same ones from another place on.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._fills = 0

    def fill(self, tensor: Tensor) -> Tensor:
        """Fill a tensor of one dimension, and return it."""
        kind = tensor.dtype, tensor.device
        if kind not in self._numbers:
            self._numbers[kind] = tensor.new_empty(_DRAWN + _APART).uniform_()
        self._fills += 1
        first = 61 * self._fills % _APART
        done, count = min(_DRAWN, tensor.numel()), tensor.numel()
        tensor[:done].copy_(self._numbers[kind][first : first + done])
        while done < count:
            more = min(done, count - done)
            tensor[done : done + more].copy_(tensor[:more])
            done += more
        return tensor


class StandIns:
    """Makes each value on demand; values that shared a storage share one here.

    What is `external` serves as it is, or as a copy where it is `written` to. `chosen` says how
    many elements of a mask are true, where that decides sizes. Without numbers that are `drawn`,
    floating ones are all the same, which is faster.
    """

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        device: torch.device,
        external: Mapping[str, Tensor],
        written: Collection[str] = (),
        chosen: Mapping[str, int] | None = None,
        *,
        drawn: Drawn | None = None,
    ) -> None:
        self.infos, self.device, self.external = infos, device, external
        self.written, self.chosen = frozenset(written), chosen or {}
        self.drawn = drawn
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
            self._storages[info.alias_of] = _filled(made, self.drawn)
            made[: self.chosen.get(info.alias_of, 0)] = 1
        whole = self._storages[info.alias_of]
        if whole.dtype != info.dtype:
            whole = _filled(torch.empty_like(whole.view(info.dtype)), self.drawn)
        shown = whole.as_strided(info.shape, info.stride, info.offset)
        return torch._conj(shown) if info.is_conj else shown


def _filled(tensor: Tensor, drawn: Drawn | None) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.zero_()  # valid as indices
    return tensor.fill_(0.5) if drawn is None else drawn.fill(tensor)
