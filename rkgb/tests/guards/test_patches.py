"""Functions that are replaced for a while: for one thread, and in any order of ends."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb.capture.record import make_B
from rkgb.errors import SideEffectError
from rkgb.outside.contents import Contents
from rkgb.torch_api.patches import Patches, meant


class Place:
    nothing: Any = None

    @staticmethod
    def name() -> str:
        return "its own"


class Heir(Place):
    pass


def in_another_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_what_was_none_is_none_again_and_what_was_inherited_is_inherited() -> None:
    with Patches([(Place, "nothing", lambda: "ours"), (Heir, "name", lambda: "ours")]):
        assert Place.nothing() == Heir.name() == "ours"
    assert vars(Place)["nothing"] is None
    assert "name" not in vars(Heir)


def test_what_is_meant_is_the_same_however_many_stand_on_each_other() -> None:
    own = vars(Place)["name"]
    with Patches([(Place, "name", lambda: "ours")]):
        assert meant(vars(Place)["name"]) is own
        with Patches([(Place, "name", lambda: "another's")]):
            assert meant(vars(Place)["name"]) is own
    assert meant(vars(Place)["name"]) is own


def test_another_thread_gets_what_was_there() -> None:
    with Patches([(Place, "name", lambda: "ours")]):
        assert Place.name() == "ours"
        assert in_another_thread(Place.name) == "its own"


def test_patches_of_two_threads_end_in_the_order_in_which_they_began() -> None:
    before = vars(Place)["name"]
    first = Patches([(Place, "name", staticmethod(lambda: "first"))])
    first.__enter__()
    began, over = threading.Event(), threading.Event()
    seen: list[str] = []

    def work() -> None:
        with Patches([(Place, "name", staticmethod(lambda: "second"))]):
            began.set()
            over.wait(10)
            seen.append(Place.name())
        seen.append(Place.name())

    thread = threading.Thread(target=work)
    thread.start()
    began.wait(10)
    assert Place.name() == "first"
    first.__exit__()
    assert Place.name() == "its own"
    over.set()
    thread.join()
    assert seen == ["second", "its own"]
    assert vars(Place)["name"] is before


def test_undone_does_not_begin_what_has_ended() -> None:
    patches = Patches([(Place, "name", lambda: "ours")])
    with patches:
        pass
    with patches.undone():
        pass
    assert Place.name() == "its own"


class Meeting(nn.Module):
    """Waits for another thread in the middle of its forward."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.meet()
        return torch.tanh(y)


def during_a_recording(work: Callable[[], Any]) -> Any:
    """Return what some work of another thread gives, which is there before the recording begins."""
    first, asked, over = (threading.Lock() for _ in range(3))  # no recording follows them
    asked.acquire()
    over.acquire()
    found: list[Any] = []

    def run() -> None:
        asked.acquire()
        try:
            found.append(work())
        except Exception as error:
            found.append(error)
        over.release()

    def meet() -> None:
        if first.acquire(blocking=False):
            asked.release()
            over.acquire()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    make_B(Meeting(meet), torch.randn(2, 4))
    thread.join()
    return found[0]


def test_another_thread_trains_checkpoints_reads_and_seeds_during_a_recording() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)

    def work() -> bool:
        y = torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False)
        y.sum().backward()
        (grad,) = torch.autograd.grad(linear(x).sum(), linear.weight)
        linear.note = "set"
        numpy = bool((y.detach().numpy() == y.detach().tolist()).all())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
        return bool(torch.equal(grad, linear.weight.grad)) and numpy

    assert during_a_recording(work) is True


def test_another_thread_prints_and_warns_during_a_recording(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> str:
        print("a line of another thread")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            warnings.warn("a warning of another thread", stacklevel=1)
        return str(heard[0].message)

    out, err, filters = sys.stdout, sys.stderr, list(warnings.filters)
    assert during_a_recording(work) == "a warning of another thread"
    assert capsys.readouterr().out == "a line of another thread\n"
    assert (sys.stdout, sys.stderr, list(warnings.filters)) == (out, err, filters)


def test_its_own_warnings_are_not_heard_and_its_prints_are_refused() -> None:
    class Loud(nn.Module):
        def __init__(self, say: Callable[[str], object]) -> None:
            super().__init__()
            self.linear, self.say = nn.Linear(4, 4), say

        def forward(self, x: Tensor) -> Tensor:
            self.say("hello")
            y: Tensor = self.linear(x)
            return y

    make_B(Loud(warnings.warn), torch.randn(2, 4))
    with pytest.raises(SideEffectError, match="prints"):
        make_B(Loud(print), torch.randn(2, 4))


def test_a_class_is_held_as_it_is_without_replacements() -> None:
    """What is put back after a recording is no function of ours, and nothing that was inherited."""

    class Base:
        def named(self) -> int:
            return 1

    class Derived(Base):
        pass

    before = vars(Base)["named"]
    held = Contents()
    with Patches([(Base, "named", lambda _: 2), (Derived, "named", lambda _: 3)]):
        held.add(Base)
        held.add(Derived)
        assert Derived().named() == 3
        assert not [*held.changed()]
    assert not [*held.changed()]
    held.restore()
    assert vars(Base)["named"] is before
    assert "named" not in vars(Derived)
