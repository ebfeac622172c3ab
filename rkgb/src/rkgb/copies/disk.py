"""A folder for what leaves the device: a file for each step, of exactly the size of its arena.

Space is reserved when the file is made, so a full disk says so before anything has moved. The file
has no name from then on: it is gone with the process, however that ends. Where the file system can,
bytes go past its cache, which would be memory again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from rkgb.copies.moved import PAGE_BYTES, Block, in_pages
from rkgb.copies.workers import HostBlock, Workers
from rkgb.errors import CopyError

_BOUNCE_BYTES = 1 << 20  # of aligned memory, through which a copy goes
_DIRECT = getattr(os, "O_DIRECT", 0)  # missing on macOS


class Disk(Workers):
    """Copies to files in a folder, beside the computation of a CPU.

    Raises:
        CopyError: there is no such folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CopyError(
                f"asked to keep what leaves the device in '{folder}', and found no such folder. "
                "Make it, or give another one, on a fast disk with enough space.",
                path=str(folder),
            )
        self._bounces = {direction: HostBlock(_BOUNCE_BYTES) for direction in ("out", "back")}

    def new_block(self, size_bytes: int) -> FileBlock:
        return FileBlock(self.folder, size_bytes)

    def copy(self, way: str, block: Block, offset: int, address: int, size_bytes: int) -> None:
        assert isinstance(block, FileBlock)
        bounce = self._bounces[way]
        with block.explaining("write" if way == "out" else "read", size_bytes):
            for start in range(0, size_bytes, _BOUNCE_BYTES):
                count = min(_BOUNCE_BYTES, size_bytes - start)
                pages = memoryview(bounce.pages)[: in_pages(count)]
                if way == "out":
                    ctypes.memmove(bounce.address, address + start, count)
                    block.write(pages, offset + start)
                else:
                    block.read(pages, offset + start)
                    ctypes.memmove(address + start, bounce.address, count)


class FileBlock:
    """A file without a name."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder, self.size_bytes, self.is_broken = folder, size_bytes, False
        self.file = -1
        self._process = os.getpid()
        with self.explaining("reserve", size_bytes):
            self.file = _opened(folder)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file, 0, size_bytes)
            else:
                os.truncate(self.file, size_bytes)

    @contextlib.contextmanager
    def explaining(self, what: str, size_bytes: int) -> Iterator[None]:
        """Raise errors of the operating system as ours; after one the file is not used again.

        Raises:
            CopyError: an error of the operating system was raised inside.
        """
        try:
            if self._process != os.getpid():
                raise OSError(errno.EBADF, "it belongs to the process that this was forked from")
            yield
        except OSError as error:
            self.is_broken = True
            raise CopyError(
                f"asked to {what} {size_bytes} bytes in a file in '{self.folder}', which has what "
                f"a step keeps away from the device, and found: {error.strerror or error}. No "
                "parameter is lost, and the next step takes another file. Make room or mend the "
                "disk, give another folder, or plan without one.",
                path=str(self.folder),
            ) from error

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of the data at an offset."""
        while data:
            count = os.pwrite(self.file, data, offset)
            data, offset = data[count:], offset + count

    def read(self, data: memoryview, offset: int) -> None:
        """Fill the data from an offset."""
        while data:
            count = os.preadv(self.file, [data], offset)
            if not count:
                raise OSError(errno.EIO, f"the file ends after {offset} bytes")
            data, offset = data[count:], offset + count

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


def _opened(folder: Path) -> int:
    """Return a new file, past the cache of the file system if that can be."""
    for flags in (_DIRECT, 0):
        name = folder / f".rkgb-{secrets.token_hex(8)}"
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        except OSError as error:
            if flags and error.errno == errno.EINVAL:
                continue
            raise
        name.unlink()
        if not flags or _takes_pages(file):
            return file
        os.close(file)
    raise AssertionError("a file without flags is taken or refused")


def _takes_pages(file: int) -> bool:
    try:
        return os.pwrite(file, HostBlock(PAGE_BYTES).pages, 0) == PAGE_BYTES
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
