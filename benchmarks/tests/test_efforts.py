"""A larger effort of planning is never worse, on the recorded instances."""

from __future__ import annotations

import pytest

from planning.instances import INSTANCES, Instance
from rockmate import InfeasibleBudgetError
from rockmate.planning import plan

QUICK = ("fno-cpu-cpu", "gpt-cpu-cpu")
SHARE = 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if path.stem in QUICK else pytest.mark.nightly)
        for path in sorted(INSTANCES.glob("*.json"))
    ],
)
def test_a_larger_effort_is_never_worse(name: str) -> None:
    instance = Instance.from_json((INSTANCES / f"{name}.json").read_text(encoding="utf-8"))
    budget = int(SHARE * instance.plain_peak_bytes)
    efforts: list[str | float] = ["fast", "balanced"]
    efforts += [] if name in QUICK else ["best", 300.0]
    found = []
    for effort in efforts:
        try:
            found.append(plan(instance.problem, budget, effort=effort))
        except InfeasibleBudgetError:
            assert not found  # a larger effort may take a budget that a smaller one refuses
    times = [one.overhead_ms for one in found]
    assert times == sorted(times, reverse=True)
    bounds = [one.bound_ms or 0.0 for one in found]
    assert max(bounds, default=0.0) <= min((one.time_ms for one in found), default=0.0) * (1 + 1e-9)
