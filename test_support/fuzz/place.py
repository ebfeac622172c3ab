"""Where cases run: the device on which everything is made."""

from __future__ import annotations

import os

import torch


def run_on(device: str) -> None:
    """Have the tensors of this process on a device, whose kernels add in one order."""
    if device == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product
    torch.set_default_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
