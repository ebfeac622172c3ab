"""Print what a step does on CUDA tensors without content: as recorded, and as torch runs it.

Run with `no_driver.c` where there is no GPU; see test_fake_cuda_tensors.py.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.capture import record_sizes
from rkgb.device.chosen import standing_in
from rkgb.device.cuda import Cuda

# It would take memory from the device, so that it is awake.
fake_tensor.init_gpu_context = lambda device: None
CUDA = torch.device("cuda", 0)


class WithoutGenerator(Cuda):
    """A CUDA device of which no random number is ever drawn."""

    def random_state(self) -> Tensor | None:
        return None


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.inner(x)


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))
    return {
        "linear": (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1)), torch.ones(2, 8)),
        "images": (nn.Sequential(images, nn.MaxPool2d(2)), torch.ones(2, 3, 16, 16)),
        "encoder layer": (layer, torch.ones(2, 8, 64)),
        "autocast": (Autocast(copy.deepcopy(layer)), torch.ones(2, 8, 64)),
    }


class Seen(TorchDispatchMode):
    """The operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        return result


def plain(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return the operations of a step as torch runs it, and the bytes that autograd keeps."""
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        twin = copy.deepcopy(model)
        for module in twin.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    like = torch.empty_like(parameter, device=CUDA)
                    module._parameters[name] = nn.Parameter(like)
        sample = torch.empty_like(x, device=CUDA)
        kept: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Seen() as forward:
            out = twin(sample)
        keep(out)
        for outside in (sample, *twin.parameters()):
            kept.pop(outside.untyped_storage()._cdata, None)
        with Seen() as backward:
            out.backward(torch.empty_like(out))
        kept_bytes = sum(storage.nbytes() for storage in kept.values())
    return {"forward": forward.names, "backward": backward.names, "kept_bytes": kept_bytes}


def recorded(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return the same of the recording."""
    step = record_sizes(model, x, device=CUDA)
    return {
        "forward": [str(op.target) for op in step.basic.ops],
        "backward": [str(op.target) for op in step.basic.backward],
        "kept_bytes": step.held_bytes[step.basic.ops[-1].name],
        "device": str(step.basic.device),
    }


def main() -> None:
    found = {}
    with standing_in(WithoutGenerator(CUDA)):
        for name, (model, x) in networks().items():
            found[name] = {"recorded": recorded(model, x), "plain": plain(model, x)}
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    # Without its usual end, at which autograd's thread for a device that is none aborts at times.
    os._exit(0)


if __name__ == "__main__":
    main()
