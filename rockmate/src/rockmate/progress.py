"""Phases of planning: their seconds, and a progress bar where the user wants one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("rockmate")


class Phases:
    """Times named phases and shows them on one progress bar.

    An error inside a phase closes the bar. As a context manager it closes after any other error
    too, so that the traceback begins on a line of its own.
    """

    def __init__(self, names: tuple[str, ...], *, show: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._bar: Any = None
        if show:
            from tqdm import tqdm

            self._bar = tqdm(
                total=len(names),
                desc="planning",
                bar_format="{desc:<26} {bar:30} {n_fmt}/{total_fmt} [{elapsed}]",
                leave=True,
            )

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._end("planning failed")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside under `name`."""
        if self._bar is not None:
            self._bar.set_description_str(f"planning: {name}")
        began = time.perf_counter()
        try:
            yield
        except BaseException:  # also when a person interrupts it
            self._end(f"failed: {name}")
            raise
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        _log.debug("%s took %.2f s", name, self.seconds[name])
        if self._bar is not None:
            self._bar.update(1)

    def note(self, text: str) -> None:
        """Show what the current phase is doing."""
        if self._bar is not None:
            self._bar.set_description_str(f"planning: {text}"[:26])

    def close(self, text: str) -> None:
        """Fill the bar and leave it with `text`."""
        if self._bar is not None:
            self._bar.n = self._bar.total
            self._end(text)

    def _end(self, text: str) -> None:
        """Leave the bar as it is, with `text`; from now on nothing is shown."""
        if self._bar is not None:
            self._bar.set_description_str(text)
            self._bar.close()
            self._bar = None
