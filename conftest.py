"""Shared by all tests: threads of parallel runs, and torchvision beside a CPU build of torch."""

from __future__ import annotations

import importlib.util
import os

import torch


def _declare_missing_operators() -> None:
    # torchvision's wheel registers these two only together with its compiled library, which a CPU
    # build of torch cannot load; importing it (as transformers does) fails without the schemas.
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    for name in ("nms", "qnms"):
        try:
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        except RuntimeError:  # declared already: this torchvision has its library
            return


_declare_missing_operators()

if "PYTEST_XDIST_WORKER" in os.environ:  # set in the processes of `pytest -n 2`
    torch.set_num_threads(1)  # the processes share the cores; each with all of them would be slower
