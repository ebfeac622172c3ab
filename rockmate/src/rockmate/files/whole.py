"""Atomic files: they are written under another name and renamed, so readers see all or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from rockmate.errors import PlanFileError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; an older one stays until the new one is complete.

    A process that dies in between leaves at most a file of another name, ending in `.part`. If the
    path is a link, its target is written.

    Raises:
        OSError: it cannot be written, or the path is not a regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "something that is no file lies there", str(path))
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


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that a user has named; an older one stays until the new one is complete.

    Raises:
        PlanFileError: it cannot be written.
    """
    try:
        write_whole(Path(path), text.encode())
    except (OSError, ValueError) as error:  # ValueError: the path is invalid
        raise PlanFileError(
            f"cannot write the plan file {os.fspath(path)!r}: {error}. Nothing was changed there. "
            "Name a file in a folder that exists and that this process may write to."
        ) from None


def load_text(path: str | os.PathLike[str]) -> str:
    """Read a file that a user has named.

    Raises:
        PlanFileError: it cannot be read, or is no text file.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device might never end
            raise OSError(errno.EINVAL, "something that is no file lies there")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot read the plan file {os.fspath(path)!r}: {error}") from None


def _usual_mode() -> int:
    """Return the mode of files that this process makes; temporary ones are private."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
