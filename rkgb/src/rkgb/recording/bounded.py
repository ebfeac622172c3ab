"""Record a known step again within a memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rkgb.errors import RkgbError
from rkgb.recording.recorder import Recorder


class TooLargeError(RkgbError):
    """The next operation would exceed the memory limit of the recording."""


class BoundedRecorder(Recorder):
    """Stays within a memory limit, if operations need the bytes of the known step."""

    def __init__(self, needs_bytes: Sequence[int], most_bytes: int, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.needs_bytes, self.most_bytes = needs_bytes, most_bytes
        self._most_held = 0  # upper bound of the held bytes
        self._next = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        place = self.count
        if not self.is_paused and self._next <= place < len(self.needs_bytes):
            self._next = place + 1
            self.claim(self.needs_bytes[place])
        return super().run(func, args, kwargs)

    def claim(self, size_bytes: int) -> None:
        """Count memory that is about to be allocated.

        Raises:
            TooLargeError: it would exceed the limit.
        """
        if self._most_held + size_bytes > self.most_bytes:
            self._most_held = self.held_bytes()
        if self._most_held + size_bytes > self.most_bytes:
            raise TooLargeError
        self._most_held += size_bytes

    def held_bytes(self) -> int:
        """Return the bytes of all live values of the step; stand-ins count separately."""
        outside = {root for root in self.resident if self.kinds.get(root) != "tangent"}
        living = (root for root in self.names.living() if root not in outside)
        return sum(self.infos[root].counted_bytes for root in living)
