"""Seconds of planning and of estimates: phases, with a progress bar if wanted, and their parts.

The parts of planning (options, chain, simulation) are called from many places. A timer would have
to be in every signature, so `timed` adds to the active `stopwatch` instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

_log = logging.getLogger("rockmate")
_current: ContextVar[dict[str, float] | None] = ContextVar("rockmate_stopwatch", default=None)


def shows_by_default() -> bool:
    """Return whether to show progress: in a terminal or a notebook, in the first process."""
    if os.environ.get("RANK", "0") != "0":
        return False
    return sys.stderr is not None and (sys.stderr.isatty() or _in_notebook())


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules and sys.modules["IPython"].get_ipython() is not None


class Phases:
    """Times named phases and shows them on one progress bar, with the remaining time.

    `shares` are the usual shares of the phases. An error inside a phase closes the bar. As a
    context manager it also closes after any other error, so that the traceback begins on a new
    line.
    """

    def __init__(
        self, shares: Mapping[str, float], *, show: bool | None, title: str = "planning"
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._shares = shares
        self._done: dict[str, float] = {}  # of each phase, a fraction
        self._now, self._title = "", title
        self._bar: Any = None
        if shows_by_default() if show is None else show:
            from tqdm import tqdm

            self._bar = tqdm(
                total=100,
                desc=title,
                bar_format="{desc:<26} {bar:30} {percentage:3.0f}% [{elapsed}<{remaining}]",
                leave=True,
                smoothing=0,  # the mean, because phases differ much
            )

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._end(f"{self._title} failed")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the code inside as phase `name`."""
        self._now = name
        self._show(f"{self._title}: {name.replace('_', ' ')}")
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:  # also on Ctrl-C
            word = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            self._end(f"{word}: {name}")
            raise
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        _log.debug("%s took %.2f s", name, self.seconds[name])
        self._done[name] = 1.0
        self._show()

    def note(self, text: str, fraction: float = 0.0) -> None:
        """Show what the current phase is doing, and its completed fraction."""
        self._done[self._now] = max(fraction, self._done.get(self._now, 0.0))
        self._show(f"{self._title}: {text}"[:26])

    def close(self, text: str) -> None:
        """Fill the bar and end it with `text`."""
        self._done = dict.fromkeys(self._shares, 1.0)
        self._show()
        self._end(text)

    def _show(self, text: str | None = None) -> None:
        if self._bar is None:
            return
        if text is not None:
            self._bar.set_description_str(text, refresh=False)
        parts = ((share, self._done.get(name, 0.0)) for name, share in self._shares.items())
        self._bar.n = round(100 * sum(a * b for a, b in parts) / sum(self._shares.values()))
        self._bar.refresh()

    def _end(self, text: str) -> None:
        """End the bar as it is, with `text`; nothing is shown afterwards."""
        if self._bar is not None:
            self._bar.set_description_str(text)
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Collect the seconds of every `timed` part that runs inside."""
    seconds: dict[str, float] = {}
    token = _current.set(seconds)
    try:
        yield seconds
    finally:
        _current.reset(token)


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """Add the time spent inside to `part` of the active stopwatch, if there is one."""
    seconds = _current.get()
    if seconds is None:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
