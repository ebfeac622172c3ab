"""Make torchvision importable, as transformers needs it, beside a CPU build of torch."""

from __future__ import annotations

import contextlib
import importlib.util

import torch


def declare_missing_operators() -> None:
    """Declare two operators that torchvision's wheel registers only with its compiled library."""
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        with contextlib.suppress(RuntimeError):  # declared already
            torch.library.define(f"torchvision::{name}", schema)
