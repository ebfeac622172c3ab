"""Wrap a module as the tests do: planned by counted operations, the same on every machine."""

from __future__ import annotations

from typing import Any

from torch import nn

from rockmate.module import Rockmate
from rockmate.settings import Budget


def wrap(model: nn.Module, sample: Any, budget: Budget = 0.8, **options: Any) -> Rockmate:
    """Return `model` wrapped, planned with `cost="flops"`, and fast: few tests are of plans."""
    return Rockmate(model, sample, budget, **{"cost": "flops", "effort": "fast", **options})
