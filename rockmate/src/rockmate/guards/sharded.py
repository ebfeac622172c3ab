"""What a module is to torch: its class before sharding, its device, this process's part of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements import flatten, is_running, outermost, settled
from rockmate.errors import UnsupportedModuleError


def own_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard`, or `kind` if it is not sharded.

    A recording is made on a copy, and instances of FSDP's class refuse to be copied.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is None or not issubclass(kind, sharded):
        return kind
    order = kind.__mro__
    own: type[nn.Module] = order[order.index(sharded) + 1]
    return own


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as it was before FSDP replaced it."""
    return own_class(type(module)).__name__


def device_of_parameters(model: nn.Module) -> torch.device:
    """Return the device of the first parameter, or the host if there is none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def world_size() -> int:
    """Return how many processes train together; 1 where none do."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


# Wrappers of torch with collectives of their own. Steps that planning runs would start these too.
_ENGINES = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "Plan the module in it: "
    "rockmate.apply(ddp.module, ...), or rockmate.apply(model, ...) before DDP is put around it",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP1 keeps "
    "parameters in flat pieces that are there only inside its own forward. Shard with FSDP2 "
    "(torch.distributed.fsdp.fully_shard), then call rockmate.apply_to_blocks",
}


def refuse_engines(model: nn.Module) -> None:
    """Refuse wrappers with collectives of their own, around the model or inside it.

    Raises:
        UnsupportedModuleError: there is one; the message says what to give instead.
    """
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            advice = _ENGINES.get(f"{kind.__module__}.{kind.__qualname__}")
            if advice is not None:
                raise UnsupportedModuleError(
                    f"module '{path or '(root)'}' is a {kind.__qualname__}, which exchanges "
                    f"gradients with other processes, and planning runs steps of its own. {advice}."
                )


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module itself."""
    return own_class(type(module)) is not type(module)


def spread_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of submodules that own distributed tensors, as after tensor parallelism.

    They compute with distributed tensors. Their inputs and outputs may be plain ones.
    """
    return tuple(
        path
        for path, module in model.named_modules()
        if any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False))
    )


def whole_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the outermost of `spread_parts`, which become opaque calls."""
    return outermost(spread_parts(model))


def settled_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of a call after the collectives that compute them have ended.

    Programs run kernels directly. Only an operation that torch dispatches would wait by itself.
    """
    leaves, structure = flatten((tuple(args), dict(kwargs)))
    if not any(map(is_running, leaves)):
        return args, kwargs
    return structure.unflatten(list(map(settled, leaves)))  # type: ignore[no-any-return]


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor, or a plain tensor itself."""
    if not hasattr(tensor, "device_mesh"):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
