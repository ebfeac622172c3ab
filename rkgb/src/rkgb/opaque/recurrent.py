"""Recurrent layers whose dropout cuDNN draws, from a state that no generator of torch's knows.

Torch seeds that state from its generator at the first use, and again when a program has set the
generator since (aten/src/ATen/native/cudnn/RNN.cpp, `get_dropout_state`). So a call that runs again
after the generator was put back draws other numbers than a first call in the middle of training.
"""

from __future__ import annotations

import logging

from torch import nn

_log = logging.getLogger("rkgb")
_told: set[str] = set()


def draws_by_cudnn(module: nn.Module) -> bool:
    """Return whether a module on CUDA draws from that state, and say so once for each type."""
    if not (isinstance(module, nn.RNNBase) and module.training and module.dropout > 0):
        return False
    name = type(module).__name__
    if name not in _told:
        _told.add(name)
        _log.warning(
            "%s draws the dropout between its layers by cuDNN, from a state that torch cannot put "
            "back: it runs once in a step, and its masks may be others than in a plain run from "
            "the same seed. Single layers with nn.Dropout between them have plain PyTorch's bits.",
            name,
        )
    return True
