"""An amount of memory from the environment: a training is planned without a word in its code.

`ROCKMATE_BUDGET=8GB` or `ROCKMATE_MEMORY=24GB` serve where a switch of a trainer is given neither.
"""

from __future__ import annotations

import os
from typing import Any


def amount(budget: Any = None, memory: Any = None) -> dict[str, Any]:
    """Return what is given, or else what the environment says."""
    if budget is None and memory is None:
        budget, memory = (os.environ.get(f"ROCKMATE_{name}") for name in ("BUDGET", "MEMORY"))
    return {"budget": budget, "memory": memory}
