"""The folder that keeps plans between two starts of a training.

Each plan is one file, named by a digest of everything that the plan depends on. So another torch,
device, kernel choice, shape or budget leads to another file. Files are written under another name
and renamed, which is atomic: processes that write at once leave one complete file. A file that
cannot be read or written is no error; the plan is then not cached. The least recently used files
are removed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rockmate.errors import PlanFileError
from rockmate.files.plan_file import PlanFile, write_whole

_log = logging.getLogger("rockmate")
ENVIRONMENT = "ROCKMATE_CACHE"
_OFF = frozenset(("", "0", "off", "no", "false", "none"))
_SUFFIX = ".plan.json"


def usual_folder() -> Path:
    """Return the platform's cache directory for this user."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rockmate"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "rockmate" / "Cache"
    base = os.environ.get("XDG_CACHE_HOME")
    named = Path(base) if base else None
    usable = named is not None and named.is_absolute()  # the standard says to ignore others
    return (named if named and usable else Path.home() / ".cache") / "rockmate"


@dataclass(frozen=True)
class CacheFolder:
    """Plans by key in one folder, with at most `most_bytes` in total."""

    path: Path
    most_bytes: int = 256 << 20

    @classmethod
    def chosen(cls, choice: bool | str | os.PathLike[str] | None) -> CacheFolder | None:
        """Return the folder for a user's choice, or None for no cache.

        A path is the folder itself. None means the value of `ROCKMATE_CACHE` (a path, or "off"),
        or without it the user's cache directory. True means the same, but ignores "off".
        """
        if choice is False:
            return None
        if isinstance(choice, (str, os.PathLike)):
            return cls(Path(choice).expanduser())
        named = os.environ.get(ENVIRONMENT)
        if named is not None and named.strip().lower() not in _OFF:
            return cls(Path(named).expanduser())
        if named is not None and choice is None:
            return None
        try:
            return cls(usual_folder())
        except RuntimeError:  # there is no home
            return None

    def get(self, key: str) -> PlanFile | None:
        """Return the plans kept under a key, or None."""
        place = self._place(key)
        try:
            text = place.read_text(encoding="utf-8")
            found = PlanFile.from_json(text)
        except (OSError, UnicodeDecodeError):
            return None
        except PlanFileError as error:  # another version, or damaged: plan anew
            _log.info("a plan in the cache is not used: %s", error)
            return None
        with contextlib.suppress(OSError):
            os.utime(place)  # marks it as used
        return found

    def put(self, key: str, plans: PlanFile) -> bool:
        """Store plans under a key, replacing older ones; return whether that succeeded.

        If the folder becomes too large, the least recently used plans are removed.
        """
        data = plans.to_json().encode()
        if len(data) > self.most_bytes:
            return False
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self._place(key), data)
        except OSError as error:
            _log.info("the plan is not kept in %s: %s", self.path, error)
            return False
        self._shrink(self._place(key))
        return True

    def clear(self) -> None:
        """Remove every plan in the folder, and nothing else."""
        for _, _, place in self._files():
            with contextlib.suppress(OSError):
                place.unlink()

    def _place(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return (time of last use, bytes, path) of every plan, skipping files that vanish."""
        found = []
        for place in sorted((*self.path.glob(f"*{_SUFFIX}"), *self.path.glob(".*.part"))):
            with contextlib.suppress(OSError):
                state = place.stat()
                found.append((state.st_mtime, state.st_size, place))
        return found

    def _shrink(self, newest: Path) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, place in files:
            if total <= self.most_bytes:
                return
            if place == newest:
                continue
            with contextlib.suppress(OSError):
                place.unlink()
                total -= size
