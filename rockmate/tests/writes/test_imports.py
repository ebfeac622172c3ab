"""A forward that imports a module of the user's for the first time, which runs once."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rkgb.capture.step import RecordedStep
from rkgb.errors import NoStepError
from rockmate import Rockmate

NAME = "first_imported_in_a_forward"
OTHER = "found_in_a_forward"


class Net(nn.Module):
    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.first, self.second, self.branches = nn.Linear(8, 8), nn.Linear(8, 4), branches

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.branches and x.sum() > 1e6:  # so that it runs whole
            x = 2 * x
        return self.second(x) * importlib.import_module(NAME).scale()  # type: ignore[no-any-return]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return tmp_path


def _written(place: Path, text: str) -> None:
    (place / f"{NAME}.py").write_text(f"import random, torch\n{text}")


@pytest.mark.parametrize("branches", [False, True])
def test_it_leaves_what_it_leaves(
    branches: bool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints and writes, and tensors: kernels of a recording may be skipped."""
    _written(
        place,
        "print('imported')\n"
        f"open({str(place / 'log')!r}, 'w').write('imported')\n"
        "first = torch.ones(4) + torch.ones(4)\n"
        "second = torch.ones(4) + torch.ones(4)\n"
        "def scale(): return second\n",
    )
    torch.manual_seed(0)
    model, x = Net(branches=branches), torch.randn(6, 8)
    planned = Rockmate(model, (x,), "1MB", cost="flops", cache=False, progress=False)
    assert capsys.readouterr().out == "imported\n"
    assert (place / "log").read_text() == "imported"
    assert torch.equal(planned(x), model(x))
    assert torch.equal(sys.modules[NAME].second, torch.full((4,), 2.0))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("draw", ["torch.rand(1)", "random.random()", "torch.manual_seed(3)"])
def test_one_that_draws_is_refused_by_name(draw: str, branches: bool, place: Path) -> None:
    _written(place, f"{draw}\ndef scale(): return 2.0\n")
    model, x, before = Net(branches=branches), torch.randn(6, 8), torch.get_rng_state()
    with pytest.raises(NoStepError, match=f"import '{NAME}' before"):
        Rockmate(model, (x,), "1MB", cost="flops", cache=False, progress=False)
    assert NAME not in sys.modules
    assert torch.equal(before, torch.get_rng_state())
    importlib.import_module(NAME)
    planned = Rockmate(model, (x,), "1MB", cost="flops", cache=False, progress=False)
    assert torch.equal(planned(x), model(x))


def test_what_it_keeps_of_planning_keeps_nothing_alive(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may keep a stream, a function of torch, and what would load a module that lies nowhere."""
    _written(
        place,
        "import importlib.util\n"
        "from sys import stdout\n"
        "from torch.utils.checkpoint import checkpoint\n"
        f"found = importlib.util.find_spec('{OTHER}')\n"
        "def scale(): return 2.0\n",
    )
    (place / f"{OTHER}.py").write_text("value = 3")
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) is RecordedStep}
    model, x = Net(branches=False), torch.randn(6, 8)
    planned = Rockmate(model, (x,), "1MB", cost="flops", cache=False, progress=False)
    gc.collect()
    assert {id(o) for o in gc.get_objects() if type(o) is RecordedStep} <= before
    kept = sys.modules[NAME]
    print("still there", file=kept.stdout)
    assert capsys.readouterr().out == "still there\n"
    weight = torch.randn(3, requires_grad=True)
    kept.checkpoint(torch.exp, weight, use_reentrant=False).sum().backward()
    assert torch.equal(weight.grad, weight.exp())
    loaded = importlib.util.module_from_spec(kept.found)
    kept.found.loader.exec_module(loaded)
    assert loaded.value == 3
    planned(x).sum().backward()
