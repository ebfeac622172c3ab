"""The random state from which cuDNN draws the dropout between recurrent layers.

Torch makes it in a process's first forward of such layers, with a number of its own generator as
the seed, which it reads. From then on no generator of torch's knows what is drawn
(aten/src/ATen/native/cudnn/RNN.cpp, `DropoutState`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.torch_api.private.modes import DispatchMode

DROPOUT_STATES: dict[torch.device, Tensor] = {}  # which have been asked for; torch keeps one each


def draws_by_cudnn(module: nn.Module) -> bool:
    """Whether a module's forward draws from this state on CUDA."""
    return isinstance(module, nn.RNNBase) and module.training and module.dropout > 0


def dropout_state(where: torch.device) -> Tensor:
    """Return a device's state, in torch's own memory; make it if it is not there.

    The caller puts torch's generators back.
    """
    if where not in DROPOUT_STATES:
        lstm, seen = nn.LSTM(1, 1, num_layers=2, dropout=0.5, device=where), _Seen()
        with torch.no_grad(), seen:
            lstm(torch.ones(1, 1, 1, device=where))
        if seen.state is not None:  # cuDNN may be off
            DROPOUT_STATES[where] = seen.state
    return DROPOUT_STATES.get(where, torch.empty(0, device=where))


class _Seen(DispatchMode):
    state: Tensor | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default:
            self.state = args[15]  # `dropout_state`, the last one
        return func(*args, **kwargs)
