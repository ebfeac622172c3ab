"""Offload by hand gives plain bits and takes less memory, so that its peaks mean something."""

from __future__ import annotations

import pytest
import torch

from harness import meter
from harness.networks import NETWORKS
from measures import by_hand
from measures.strategies import apply
from measures.training import Twins

CPU = torch.device("cpu")


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("strategy", ["saved tensors", "layer inputs"])
def test_moves_by_hand_are_exact_and_save_memory(
    strategy: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_hand, "_LEAST_BYTES", 1024)
    twins = Twins(NETWORKS["gpt"].case("smoke", 2, 0), CPU)
    applied = apply(strategy, place, twins.case, twins.ours, 0)

    def step() -> None:
        applied.forward().backward()

    plain = meter.trace_memory(twins.plain_step, CPU).peak_bytes
    taken = meter.trace_memory(step, CPU).peak_bytes
    for model in (twins.plain, twins.ours):
        model.zero_grad(set_to_none=False)
    twins.plain_step()
    step()
    assert meter.first_difference(twins.plain, twins.ours) is None
    assert taken < 0.7 * plain
