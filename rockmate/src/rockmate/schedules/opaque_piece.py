"""What a plan says about opaque calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpaquePiece:
    """A submodule that is an opaque call, with its memory and time on the sample."""

    path: str
    kind: str
    held_bytes: int
    time_ms: float

    def __str__(self) -> str:
        return (
            f"opaque: '{self.path or '(root)'}' ({self.kind}) runs whole; the sample's run held "
            f"{self.held_bytes} bytes for its backward and took {self.time_ms:.2f} ms"
        )
