"""What an optimizer keeps between steps, and what it takes while it steps.

Both are found by steps of a copy on tensors without content: first with one parameter of every
kind, then with two. What a step takes grows with their number (`foreach`), or it does not (a loop).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rkgb.elements import flatten
from rkgb.engine import device_of
from rkgb.recording import LiveBytes
from rockmate.errors import UnknownChoiceError, UnsupportedModuleError
from rockmate.guards.sharded import local_part

# By name, for steps that nobody has made an optimizer for yet. Lion's step is taken for RMSprop's.
OPTIMIZERS: Mapping[str, Callable[..., Optimizer] | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "lion": torch.optim.RMSprop,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "adamw-amsgrad": partial(torch.optim.AdamW, amsgrad=True),
}
_OWN = ("state", "param_groups", "defaults")
_NUMBER_BYTES = 4
_WRAPPED = 4  # numbers that kernels take as tensors, at once


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer takes; with `in_backward`, each parameter steps when its gradient comes."""

    name: str
    state_bytes: int
    temporary_bytes: int  # while it steps, above its state
    is_there: bool = False  # the state, after a first step
    in_backward: bool = False
    copies_bytes: int = 0  # of weights that are given beside optimizers: averages, teachers


def optimizer_bytes(
    optimizer: Any, parameters: Sequence[nn.Parameter], device: torch.device
) -> OptimizerBytes:
    """Return what an optimizer, some of them, or one by name takes on a device.

    Modules among them are copies of weights that stay there.

    Raises:
        UnknownChoiceError: no optimizer has this name.
        UnsupportedModuleError: it cannot step without content, and has no state yet.
    """
    if isinstance(optimizer, OptimizerBytes):
        return optimizer
    if isinstance(optimizer, str):
        return _by_name(optimizer, parameters, device)
    optimizers, copies = _listed(optimizer)
    each = [_bytes_of(_unwrapped(one), device) for one in optimizers]
    in_backward = len(each) > 1 and all(map(_steps_when_it_comes, parameters))
    kept = (t for module in copies for t in (*module.parameters(), *module.buffers()))
    return OptimizerBytes(
        each[0].name,
        sum(one.state_bytes for one in each),
        max(one.temporary_bytes for one in each),
        all(one.is_there for one in each),
        in_backward,
        tensors_bytes(kept, device),
    )


def without_tensors(optimizer: Any) -> OptimizerBytes:
    """Return what an optimizer takes, for copies and files, which do not hold the optimizer."""
    if isinstance(optimizer, OptimizerBytes):
        return optimizer
    groups = [group for one in _listed(optimizer)[0] for group in one.param_groups]
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    device = parameters[0].device if parameters else torch.device("cpu")
    return optimizer_bytes(optimizer, parameters, device)


def check_optimizer(name: str) -> None:
    """Refuse a name that no optimizer has here.

    Raises:
        UnknownChoiceError: it names those that are known.
    """
    if name not in tuple(OPTIMIZERS):
        raise UnknownChoiceError("optimizer", name, OPTIMIZERS)


def _listed(optimizer: Any) -> tuple[list[Optimizer], list[nn.Module]]:
    """Return optimizers, and modules that are given beside them."""
    found = list(optimizer.values()) if isinstance(optimizer, Mapping) else optimizer
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    optimizers = [one for one in found if isinstance(one, Optimizer)]
    modules = [one for one in found if isinstance(one, nn.Module)]
    if not optimizers or len(optimizers) + len(modules) < len(found):
        kind = type(optimizer).__name__
        more = "a torch.optim.Optimizer, or a list or dict of some, with copies of weights"
        raise UnknownChoiceError("optimizer", kind, OPTIMIZERS, more)
    return optimizers, modules


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return what accelerate and others have wrapped."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _steps_when_it_comes(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _by_name(name: str, parameters: Sequence[nn.Parameter], device: torch.device) -> OptimizerBytes:
    check_optimizer(name)
    make = OPTIMIZERS[name]
    if make is None or not parameters:
        return OptimizerBytes(name, 0, 0)
    like = [nn.Parameter(torch.empty_like(p, device="meta")) for p in map(local_part, parameters)]
    found = _bytes_of(make(like, lr=1e-3), device)
    return OptimizerBytes(name, found.state_bytes, found.temporary_bytes)


def _bytes_of(optimizer: Optimizer, device: torch.device) -> OptimizerBytes:
    block_bytes = device_of(device).block_bytes
    state = (t for own in optimizer.state.values() for t in _on(device, own))
    name, there = type(optimizer).__name__, tensors_bytes(state, device)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    is_there = bool(trained) and all(optimizer.state.get(p) for p in trained)
    whole_bytes = sum(_size(p, block_bytes) for p in trained)
    try:
        one, two = (_Rehearsal(optimizer, device, most) for most in (1, 2))
    except Exception as error:
        if not is_there:
            raise UnsupportedModuleError(
                f"{name} cannot step without content ({type(error).__name__}: {error}), so that "
                "what it will keep is not known. Run one step of it before planning with memory=, "
                "or give budget=."
            ) from error
        return OptimizerBytes(name, there, 2 * whole_bytes, True)
    temporary_bytes = two.temporary_bytes
    if temporary_bytes > one.temporary_bytes:  # all parameters at once
        temporary_bytes = -(-temporary_bytes * whole_bytes // max(1, two.whole_bytes))
    state_bytes = there if is_there else max(there, two.state_bytes)
    return OptimizerBytes(name, state_bytes, temporary_bytes, is_there)


class _Rehearsal:
    """Two steps of a copy on `most` parameters of every kind, without content."""

    def __init__(self, optimizer: Optimizer, device: torch.device, most: int) -> None:
        block_bytes = device_of(device).block_bytes
        copies_of: dict[Any, list[nn.Parameter]] = {}
        numbers: dict[Any, int] = {}
        more_bytes, groups = 0, []
        for place, group in enumerate(optimizer.param_groups):
            params = []
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                local = local_part(parameter)
                key = place, local.shape, local.stride(), local.dtype
                copies = copies_of.setdefault(key, [])
                numbers[key] = numbers.get(key, 0) + 1
                if _on_device(group) and device.type != "cpu":
                    more_bytes += block_bytes(_NUMBER_BYTES)
                if len(copies) < most:
                    copies.append(_without_content(local))
                    params.append(copies[-1])
            groups.append({**_as_on(device, group), "params": params})
        copied = [one for copies in copies_of.values() for one in copies]
        twin = _twin(optimizer, [group for group in groups if group["params"]])
        gradients = [p.grad for p in copied if p.grad is not None]
        live = LiveBytes([*copied, *gradients], device, block_bytes)
        step = type(twin).step
        with live, torch.no_grad():
            for _ in range(2):
                getattr(step, "__wrapped__", step)(twin)  # without hooks
        self.whole_bytes = sum(_size(p, block_bytes) for p in copied)
        self.temporary_bytes = live.peak_bytes - live.now_bytes + _WRAPPED * block_bytes(8)
        self.state_bytes = more_bytes + sum(
            numbers[key] * sum(_size(t, block_bytes) for t in _on(device, twin.state[copies[0]]))
            for key, copies in copies_of.items()
        )


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    twin: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in (*_OWN, "step") and not name.startswith("_"):
            vars(twin)[name] = copy.copy(value)
    state: dict[str, Any] = {"defaults": dict(optimizer.defaults), "param_groups": groups}
    twin.__setstate__({**state, "state": defaultdict(dict)})
    return twin


def _as_on(device: torch.device, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group whose steps take on `meta` what they would take on the device."""
    made, on_device = dict(group), _on_device(group)
    if "foreach" in made and made["foreach"] is None:
        made["foreach"] = device.type == "cuda" and not made.get("fused")
    return {**made, **dict.fromkeys(on_device)}  # which asks for a device that has content


def _on_device(group: Mapping[str, Any]) -> list[str]:
    """Return the choices of a group by which it counts its steps on the device."""
    return [name for name in ("fused", "capturable") if group.get(name)]


def _without_content(tensor: Tensor) -> nn.Parameter:
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    made = nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def _on(device: torch.device, state: Any) -> Iterator[Tensor]:
    """Yield the tensors of some state that lie on a device, or would."""
    for leaf in flatten(state)[0]:
        if isinstance(leaf, Tensor):
            leaf = local_part(leaf)
            if leaf.is_meta or leaf.device.type == device.type:
                yield leaf


def _size(tensor: Tensor, block_bytes: Callable[[int], int]) -> int:
    local = local_part(tensor)
    return block_bytes(local.numel() * local.element_size())


def tensors_bytes(tensors: Iterable[Tensor], device: torch.device, *, to_come: bool = False) -> int:
    """Return the bytes of some tensors on a device, each storage once, in its blocks.

    Those that lie elsewhere are left out, unless they are `to_come`.
    """
    block_bytes, found = device_of(device).block_bytes, dict[Any, int]()
    for tensor in map(local_part, tensors):
        if tensor.is_meta:
            found[id(tensor)] = _size(tensor, block_bytes)
        elif to_come or tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            found[storage._cdata] = block_bytes(storage.nbytes())
    return sum(found.values())
