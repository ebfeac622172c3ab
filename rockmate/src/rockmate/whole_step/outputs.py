"""What a call hands out, and what a loss outside of the module may make of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.capture import outputs_without_content
from rkgb.elements import flatten
from rkgb.engine import bind_inputs, device_of
from rkgb.module_state import KeptWrites, StartOfCall
from rkgb.torch_api import placed_parameters
from rockmate.guards.sharded import is_sharded, spread_parts
from rockmate.runtime.plain import unseen
from rockmate.whole_step.optimizers import tensors_bytes

_log = logging.getLogger("rockmate")
# A loss outside keeps a copy of its input in float32 and another for its backward, and makes two
# more on the way: `cross_entropy` of shifted logits, `(y - target).abs().square().mean()`.
_COPIES = 4
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class CallBytes:
    """What a call brings, and hands out."""

    inputs_bytes: int
    outputs_bytes: int
    loss_bytes: int  # of one outside, which is estimated; 0 where the module has one

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample: Any,
        kwargs: Mapping[str, Any] | None,
        device: torch.device,
        *,
        to_come: bool = False,
    ) -> CallBytes:
        """Return them for a call of `model` on a device; the call does not run, if it need not.

        The inputs are there, or `to_come`.
        """
        leaves = flatten(bind_inputs(sample, kwargs))[0]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with unseen():
            try:
                # An engine that is stopped on the way could not run the model again.
                if spread_parts(model):
                    raise RuntimeError("spread over processes")
                found = outputs_without_content(model, sample, kwargs, device)
                trained = [tensor for tensor in found if tensor.requires_grad]
            except Exception as error:  # it looks at values, or is spread over processes
                _log.debug("outputs are found by a real forward: %s", error)
                found = _outputs(model, sample, kwargs, device)
                trained = [tensor for tensor in found if tensor.is_floating_point()]
        block_bytes = device_of(device).block_bytes
        loss_bytes = loss_outside_bytes(trained, device)
        outputs_bytes = sum(block_bytes(t.numel() * t.element_size()) for t in found)
        inputs_bytes = tensors_bytes(inputs, device, to_come=to_come)
        return cls(inputs_bytes, outputs_bytes, loss_bytes)

    def times(self, in_flight: int) -> CallBytes:
        """Return them for so many calls whose backwards come later."""
        inputs, outputs = in_flight * self.inputs_bytes, in_flight * self.outputs_bytes
        return CallBytes(inputs, outputs, self.loss_bytes)


def loss_outside_bytes(outputs: Sequence[Tensor], device: torch.device) -> int:
    """Return what a loss of these outputs may take; 0 where one of them is the loss."""
    if any(output.dim() == 0 for output in outputs):
        return 0
    sizes = (output.numel() * max(output.element_size(), _FLOAT_BYTES) for output in outputs)
    return _COPIES * sum(map(device_of(device).block_bytes, sizes))


def _outputs(
    model: nn.Module, sample: Any, kwargs: Mapping[str, Any] | None, device: torch.device
) -> list[Tensor]:
    args, keywords = bind_inputs(sample, kwargs)
    start = StartOfCall(model, device)
    try:
        with torch.no_grad(), KeptWrites(placed_parameters(model)):
            found = flatten(model(*args, **keywords))[0]
            sharded: list[Any] = [module for module in model.modules() if is_sharded(module)]
            for module in sharded:  # no backward does it
                module.reshard()
    finally:
        start.restore()
    return [leaf for leaf in found if isinstance(leaf, Tensor)]
