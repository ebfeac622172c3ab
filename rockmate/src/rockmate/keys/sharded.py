"""What torch's sharding does to a module: another class over its own, and parameters in pieces."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rkgb.elements import flatten, is_inside, is_running, settled
from rockmate.errors import UnsupportedModuleError


def own_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard`; its own where that was not called.

    What FSDP puts over a class refuses to be copied, and a recording is made on a copy.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is None or not issubclass(kind, sharded):
        return kind
    order = kind.__mro__
    own: type[nn.Module] = order[order.index(sharded) + 1]
    return own


# Wrappers of torch that talk to other processes themselves; the steps that planning runs would.
_ENGINES = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "Plan the module in it: "
    "rockmate.apply(ddp.module, ...), or rockmate.apply(model, ...) before DDP is put around it",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP1 keeps "
    "parameters in flat pieces that are there only inside its own forward. Shard with FSDP2 "
    "(torch.distributed.fsdp.fully_shard), then call rockmate.apply_to_blocks",
}


def refuse_engines(model: nn.Module) -> None:
    """Refuse a wrapper that talks to other processes, of a model or inside it.

    Raises:
        UnsupportedModuleError: it says what to give instead.
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
    """Whether `fully_shard` was called on this very module."""
    return own_class(type(module)) is not type(module)


def spread_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of submodules that own distributed tensors, as tensor parallelism leaves.

    What they compute with is no plain tensor; what goes into them and comes out of them may be.
    """
    return tuple(
        path
        for path, module in model.named_modules()
        if any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False))
    )


def whole_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the outermost of `spread_parts`, which are run whole."""
    found: list[str] = []
    for path in spread_parts(model):  # a module comes before what is in it
        if not any(is_inside(path, other) for other in found):
            found.append(path)
    return tuple(found)


def settled_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of a call once the collectives that make them have ended.

    Programs run kernels directly, and only what torch dispatches would wait.
    """
    leaves, structure = flatten((tuple(args), dict(kwargs)))
    if not any(map(is_running, leaves)):
        return args, kwargs
    return structure.unflatten(list(map(settled, leaves)))  # type: ignore[no-any-return]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a distributed tensor; a plain one is its own part."""
    if not hasattr(tensor, "device_mesh"):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
