"""The profile function of a thread, also where a profiler that is written in C was there before."""

from __future__ import annotations

import logging
import sys
from typing import Any

_log = logging.getLogger("rkgb")


def set_profile(looking: Any) -> None:
    """Let this thread's calls be looked at by what `sys.getprofile` returned before.

    Before Python 3.12 that may be a `cProfile.Profile`, which `sys.setprofile` would call. That of
    `torch.profiler.profile(with_stack=True)` cannot be set from Python: it sees no more calls.
    """
    enable = None if callable(looking) else getattr(looking, "enable", None)
    if enable is not None:
        enable()
    elif looking is None or callable(looking):
        sys.setprofile(looking)
    else:
        _log.warning(
            "torch.profiler sees no more Python calls of this profile, as a module is recorded "
            "within it. Run the first step before the profile begins."
        )
