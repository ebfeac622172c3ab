"""Record a known step again within some memory, or stop before an operation takes more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rkgb.errors import RkgbError
from rkgb.recording.recorder import Recorder


class TooLargeError(RkgbError):
    """The next operation would take more memory than a recording may."""


class BoundedRecorder(Recorder):
    """Holds no more than so many bytes, if operations take what those of the known step took."""

    def __init__(self, needs_bytes: Sequence[int], most_bytes: int, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.needs_bytes, self.most_bytes = needs_bytes, most_bytes
        self._most_held = 0  # what is held for sure no more than this
        self._next = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        place = self.count
        if not self.is_paused and self._next <= place < len(self.needs_bytes):
            self._next = place + 1
            need = self.needs_bytes[place]
            if self._most_held + need > self.most_bytes:
                self._most_held = self.held_bytes()
            if self._most_held + need > self.most_bytes:
                raise TooLargeError
            self._most_held += need
        return super().__torch_dispatch__(func, types, args, kwargs)

    def held_bytes(self) -> int:
        """Return the bytes of all that the step has made and that is alive."""
        roots = set(self.names.living()) - self.resident
        return sum(self.infos[root].storage_bytes for root in roots)
