"""Stand-ins for recorded values: tensors of the same layout with valid contents.

found = StandIns(basic.infos, basic.device, external)
found["addmm"], found["view"]       # in one storage, if they were recorded so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rkgb.elements.tensor_info import TensorInfo

_DRAWN = 1 << 14  # random numbers that are repeated in long tensors
_APART = 1 << 10  # number of different offsets at which tensors start


class Drawn:
    """Random numbers in the domain of probabilities, roots and logarithms, drawn once per type.

    Drawing takes longer than most operations on them. So long tensors repeat their first numbers,
    and different tensors have the same numbers from different offsets.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._fills = 0

    def fill(self, tensor: Tensor) -> Tensor:
        """Fill a tensor of one dimension, and return it."""
        kind = tensor.dtype, tensor.device
        if kind not in self._numbers:
            few_bits = tensor.dtype.itemsize == 1  # of eight, for which torch draws nothing
            dtype = torch.float32 if few_bits else tensor.dtype
            drawn = tensor.new_empty(_DRAWN + _APART, dtype=dtype).uniform_()
            self._numbers[kind] = drawn.to(tensor.dtype)
        self._fills += 1
        first = 61 * self._fills % _APART
        done, count = min(_DRAWN, tensor.numel()), tensor.numel()
        tensor[:done].copy_(self._numbers[kind][first : first + done])
        while done < count:
            more = min(done, count - done)
            tensor[done : done + more].copy_(tensor[:more])
            done += more
        return tensor


@dataclass(eq=False)
class StandIns:
    """Makes each value on demand; values that shared a storage share one here.

    `external` tensors are used directly, or copied if they are `written`. `chosen` is the number of
    true elements of masks that decide sizes. Without `drawn` numbers, floating-point tensors are
    filled with a constant, which is faster.
    """

    infos: Mapping[str, TensorInfo]
    device: torch.device
    external: Mapping[str, Tensor]
    written: Collection[str] = ()
    chosen: Mapping[str, int] = field(default_factory=dict)
    drawn: Drawn | None = field(default=None, kw_only=True)
    _storages: dict[str, Tensor] = field(default_factory=dict, init=False)
    _made: dict[str, Tensor] = field(default_factory=dict, init=False)

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
