"""The profile function of a thread, also where a profiler that is written in C was there before."""

from __future__ import annotations

import sys
from typing import Any


def set_profile(looking: Any) -> None:
    """Let this thread's calls be looked at by what `sys.getprofile` returned before.

    Before Python 3.12 that may be a `cProfile.Profile`, which `sys.setprofile` would call.
    """
    enable = None if callable(looking) else getattr(looking, "enable", None)
    if enable is None:
        sys.setprofile(looking)
    else:
        enable()
