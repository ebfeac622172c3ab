"""A signal is heard at once, but not while something of ours is put back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from rkgb.safeguards import interrupts, signals_wait

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class HeardError(Exception):
    """What a handler of the user raises."""


def raises(_number: int, _frame: FrameType | None) -> None:
    raise HeardError


@pytest.fixture(params=SIGNALS, ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.signal(request.param, raises)
    yield request.param
    signal.signal(request.param, before)


def wait() -> None:
    """Wait for a signal that comes late, and fail if none does."""
    for _ in range(5000):
        time.sleep(0.001)
    pytest.fail("no signal was heard")


def as_ours(source: str) -> Callable[..., Any]:
    """Return the function `run` of a source, as a function of the package's own."""
    code: CodeType = compile(source, "ours.py", "exec")
    names: dict[str, Any] = {"__name__": "rkgb.ours"}
    exec(code, names)
    function: Callable[..., Any] = names["run"]
    return function


def test_a_signal_is_heard_at_once(number: signal.Signals) -> None:
    with pytest.raises(HeardError), signals_wait():
        signal.raise_signal(number)
    assert signal.getsignal(number) is raises


SOURCES = {
    "finally": "def run(work):\n    try:\n        pass\n    finally:\n        work()\n",
    "any error": (
        "def run(work):\n    try:\n        1 / 0\n    except BaseException:\n        work()\n"
    ),
    "exit": (
        "class C:\n    def __enter__(self): pass\n    def __exit__(self, *_): self.work()\n"
        "def run(work):\n    c = C()\n    c.work = work\n    with c:\n        pass\n"
    ),
    "enter": (
        "class C:\n    def __enter__(self): self.work()\n    def __exit__(self, *_): pass\n"
        "def run(work):\n    c = C()\n    c.work = work\n    with c:\n        pass\n"
    ),
}


@pytest.mark.parametrize("where", SOURCES)
def test_a_signal_waits_while_something_is_put_back(
    number: signal.Signals, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{line}\n" for line in SOURCES[where].splitlines()]
    monkeypatch.setitem(interrupts.linecache.cache, "ours.py", (1, None, lines, "ours.py"))
    interrupts._last.cache_clear()
    done: list[bool] = []

    def work() -> None:
        signal.raise_signal(number)
        done.append(True)

    def run() -> None:
        with signals_wait():
            as_ours(SOURCES[where])(work)
            assert done
            wait()

    with pytest.raises(HeardError):
        run()
    assert signal.getsignal(number) is raises


def test_what_hangs_while_it_ends_is_stopped(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_MOST_WAITS", 3)
    monkeypatch.setattr(interrupts, "_puts_back", lambda _frame: True)

    def run() -> None:
        with signals_wait():
            signal.raise_signal(number)
            wait()

    with pytest.raises(HeardError):
        run()


def test_a_handler_that_is_set_meanwhile_stays(number: signal.Signals) -> None:
    def other(_number: int, _frame: FrameType | None) -> None: ...

    with signals_wait():
        signal.signal(number, other)
    assert signal.getsignal(number) is other


def test_other_threads_leave_handlers_alone(number: signal.Signals) -> None:
    seen: list[Any] = []

    def look() -> None:
        with signals_wait():
            seen.append(signal.getsignal(number))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [raises]
