"""Files that are whole or not there: written beside, and renamed, which is one step for readers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; what was there stays until the new one is complete.

    A process that dies in between leaves at most a file of another name, ending in `.part`.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    written = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.chmod(_usual_mode())
        written.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise


def _usual_mode() -> int:
    """Return the mode of files that this process makes; temporary ones are private."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
