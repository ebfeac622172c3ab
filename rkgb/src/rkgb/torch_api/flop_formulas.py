"""FLOP formulas of kernels for which torch has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count


def _sdpa_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _sdpa_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# Without them, attention on a CPU would cost nothing. The formulas take shapes.
EXTRA_FLOP_FORMULAS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}
