"""A step recorded once more: what Python decides is found and named, and nothing else is."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from rkgb.capture import look_again
from rkgb.capture.record import record
from rkgb.device import RngState
from rkgb.elements.sample import Sample
from rkgb.engine import trace_memory
from rkgb.graphs import Difference
from zoo.examples import EXAMPLES, example

COUNTER = ctypes.c_int(2)


class Owner:
    """Something that goes."""


def process_id() -> int:
    """Return what a test replaces, as `os.getpid` is replaced after a fork."""
    return os.getpid()


class Hidden(nn.Module):
    """Asks something that nobody sees."""

    def __init__(self, ask: Callable[[], Any], how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how, self.ask = how, Shared(ask)

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.linear(x), self.ask.call()
        match self.how:
            case "scalar":
                return x * seen
            case "branch":
                return x.relu() if seen > 2 else x.sin()
            case "loop":
                for _ in range(int(seen)):
                    x = x.tanh()
                return x
            case "constant":
                return x + torch.tensor([float(seen), 1.0, 2.0, 3.0]).repeat(2)
            case "detached":
                return x * (x.detach() if seen > 2 else x)
            case "size":
                return F.pad(x, (0, int(seen)))[:, :8]
        raise AssertionError(self.how)


class Shared:
    """A function that copies of a module have in common."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __deepcopy__(self, _memo: Any) -> Shared:
        return self


def look(
    module: nn.Module, sample: Any, change: Callable[[], None], **options: Any
) -> list[Difference] | None:
    given = Sample.of(module, sample)
    known = record(module, given, strict=False, **options)
    change()
    return look_again(module, given, known)


def net(ask: Callable[[], Any], how: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Hidden(ask, how), nn.Linear(8, 8))


def set_counter(value: int) -> Callable[[], None]:
    return lambda: setattr(COUNTER, "value", value)


@pytest.fixture(autouse=True)
def _counter() -> Iterator[None]:
    set_counter(2)()
    yield
    set_counter(2)()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("scalar", "'mul' took 2 when recorded, and takes 5 now"),
        ("branch", r"ran 'sin' \(1, test_look.py:\d+\) .* and 'relu' \(1, test_look.py"),
        ("loop", "ran 't' .* and 'tanh'"),
        ("constant", "the content of a tensor made there"),
        ("detached", "."),
        ("size", r"took \[0, 2\] when recorded, and takes \[0, 5\] now"),
    ],
)
def test_what_python_decides_is_named(how: str, what: str) -> None:
    found = look(net(lambda: COUNTER.value, how), torch.randn(4, 8), set_counter(5))
    assert found, how
    assert found[0].module_path == ("1" if how != "loop" else "")
    text = str(found[0])
    assert "test_look.py" in text
    assert re.search(what, text), text


def test_nothing_is_named_that_does_not_change() -> None:
    for how in ("scalar", "branch", "loop", "constant", "detached", "size"):
        assert look(net(lambda: COUNTER.value, how), torch.randn(4, 8), set_counter(2)) == []


def test_things_that_no_guard_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    owners = [Owner()]
    gone: list[int] = []
    kept = weakref.ref(owners[0], lambda _: gone.append(1))
    assert look(net(lambda: 1 + len(gone), "scalar"), x, owners.clear), "a callback of weakref"
    assert kept() is None

    monkeypatch.setattr(os, "getpid", lambda: 3)
    module = net(process_id, "scalar")

    def fork() -> None:
        monkeypatch.setattr(os, "getpid", lambda: 4)

    assert look(module, x, fork), "a replaced function"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_step_does_not_differ_from_itself(name: str) -> None:
    module, sample = example(name)
    assert look(module, sample, lambda: None) == []
    assert look(module, sample, lambda: None) == []


def test_a_look_leaves_no_trace() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.mean()
            return self.drop(self.norm(x))

    module, given = Stateful(), torch.randn(4, 8, requires_grad=True)
    known = record(module, Sample.of(module, given))
    before = copy.deepcopy(module.state_dict())
    stream, python = RngState.save(torch.device("cpu")), random.getstate()
    for within in (None, ([0], 1 << 20), ([1 << 30], 1 << 20)):
        sample = Sample.of(module, given)
        assert look_again(module, sample, known, within=within) == []
    assert stream.equals(RngState.save(torch.device("cpu")))
    assert python == random.getstate()
    assert not hasattr(module, "last")
    assert given.grad is None
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_runs_whole_does_not_run() -> None:
    runs: list[float] = []

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.runs = nn.Linear(8, 8), Shared(lambda: runs.append(0))

        def forward(self, x: Tensor, scale: float = 1.0, *, negate: bool = False) -> Tensor:
            self.runs.call()
            x = self.linear(x) * scale
            return -x if negate or x.sum() > 1000 else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = Whole()

        def forward(self, x: Tensor) -> Tensor:
            return self.whole(x, 0.5 * COUNTER.value, negate=COUNTER.value > 5).sin()

    module, x = Net(), torch.randn(4, 8)
    given = Sample.of(module, x)
    known = record(module, given, strict=False)
    assert known.opaque == ("whole",)
    runs.clear()
    assert look_again(module, given, known) == []
    for value, what in ((4, "took 1.0 when recorded, and takes 2.0"), (6, "took 1.0 when")):
        set_counter(value)()
        found = look_again(module, given, known)
        assert found
        assert what in str(found[0])
        assert found[0].module_path == "", "who calls it has decided"
    assert runs == []


def test_what_can_no_more_be_recorded_is_named() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (random.random() if COUNTER.value > 2 else 1.0)

    module = nn.Sequential(nn.Linear(8, 8), Drawing())
    found = look(module, torch.randn(4, 8), set_counter(3))
    assert found
    assert found[0].module_path == "1"
    assert "draws from Python's `random`" in str(found[0])


def _living() -> set[int]:
    gc.collect()
    return {id(found) for found in gc.get_objects() if issubclass(type(found), Tensor)}


@pytest.mark.parametrize("stops", [0.4, 0.9])  # in the forward, in the backward
def test_a_look_that_takes_too_much_memory_leaves_no_tensor(stops: float) -> None:
    class Net(nn.Module):
        """Its LSTM saves small results and a workspace, as they are."""

        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True)
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.last(self.cells(x.tanh())[0]).softmax(-1)
            return made

    model = Net()
    sample = Sample.of(model, (torch.randn(4, 5, 8),))
    known = record(model, sample)
    count = len(known.ops) + len(known.backward)
    needs = [0 if place < stops * count else 2**40 for place in range(count)]
    before = _living()
    for _ in range(2):
        look_again(model, sample, known, within=(needs, 2**30))
        assert not _living() - before


def test_a_look_without_content_runs_no_kernel_for_a_size_that_is_known() -> None:
    """An LSTM of MKLDNN has a workspace whose size only its kernel knows."""
    model = nn.LSTM(64, 64, batch_first=True)
    sample = Sample.of(model, (torch.randn(16, 32, 64),))
    known = record(model, sample)
    kernels = [op for op in known.ops if "rnn_layer" in str(op.target)]
    workspace = max(known.infos[name].size_bytes for op in kernels for name in op.results if name)
    needs = [2**40] * (len(known.ops) + len(known.backward))
    found: list[object] = []

    def look(_: object) -> None:
        found.append(look_again(model, sample, known, within=(needs, 2**30)))

    assert kernels
    assert trace_memory(look, torch.device("cpu")).peak_bytes < workspace / 2
    assert found == [[]]
