"""Parts of rkgb that may be taken out: without them, everything that does not need them works."""

import subprocess
import sys

import pytest

_STEP = """
import copy, importlib.abc, sys

def is_gone(name):
    return ".".join(name.split(".")[:2]) in GONE

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if is_gone(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())

import torch
from torch import nn
from rockmate import InfeasibleBudgetError, Rockmate

torch.manual_seed(0)
layers = [nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 8)]
model = nn.Sequential(*layers, *([] if SPLIT else [nn.Dropout(0.1)])).double()
x = torch.randn(64, 8, dtype=torch.float64)
twin = copy.deepcopy(model)
try:
    Rockmate(model, x, budget=1, cost="flops", split=SPLIT)
except InfeasibleBudgetError as error:
    planned = Rockmate(model, x, budget=error.minimum_bytes, cost="flops", split=SPLIT)
for module in (twin, planned):
    torch.manual_seed(1)
    module(x).square().sum().backward()
for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
    if SPLIT:
        torch.testing.assert_close(ours.grad, theirs.grad)
    else:
        assert torch.equal(ours.grad, theirs.grad)
assert not any(map(is_gone, sys.modules))
assert bool(planned.plan.cut) is SPLIT
assert SPLIT or planned.plan.overhead_percent > 0
print("planned, run, compared")
"""


@pytest.mark.parametrize(
    ("gone", "split"),
    [
        ({"rkgb.opaque", "rkgb.compiled", "rkgb.rows"}, False),
        ({"rkgb.opaque", "rkgb.compiled"}, True),
    ],
)
def test_a_step_is_planned_and_run_without_parts_that_it_does_not_need(
    gone: set[str], split: bool
) -> None:
    code = f"GONE, SPLIT = {gone}, {split}\n{_STEP}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "planned, run, compared\n", run.stderr
