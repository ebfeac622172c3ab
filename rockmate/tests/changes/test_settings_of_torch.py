"""A forward that reads settings of torch's compiler: a change is seen at the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

from oracles.training import assert_trains_like, eager_copy
from rkgb.guards.watched import Watched
from runs.planned import wrap


class Read(nn.Module):
    """A layer whose result is multiplied by what a setting says."""

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() * self.factor()


@pytest.mark.parametrize(
    ("module", "name", "read"),
    [
        (dynamo, "recompile_limit", lambda: dynamo.recompile_limit),
        (inductor, "cpp.min_chunk_size", lambda: inductor.cpp.min_chunk_size),
        (torch.compiler.config, "job_id", lambda: 2 if torch.compiler.config.job_id else 3),
    ],
    ids=["plain", "in a part", "by way of torch"],
)
def test_a_setting_that_is_read_counts(module: Any, name: str, read: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = Read(read), torch.randn(3, 4)
    twin = eager_copy(model)
    planned = wrap(model, (x,), 1.0)
    assert_trains_like(planned, twin, (x,))
    for value in (12, 12, 5):
        with module.patch({name: str(value) if name == "job_id" else value}):
            assert_trains_like(planned, twin, (x,))


def test_others_are_not_looked_at() -> None:
    watched = Watched(frozenset({"recompile_limit", "_config"}))
    watched.worth(dynamo)
    assert len(watched.checks) == 1, "the one that is asked for, however many there are"
