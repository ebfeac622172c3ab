"""Forms that a search leaves out, because a fault that they show is known and open.

An entry goes when its fault does. `python -m fuzz --all` leaves nothing out.
"""

from __future__ import annotations

_HIDDEN = "hooks and gradients of tensors inside, and of outputs beside the loss"

KNOWN = {
    **dict.fromkeys(
        ("hook that watches", "output's gradient kept", "kept with its gradient"), _HIDDEN
    ),
    "error at a weight": _HIDDEN,
    "listed results": "a list of tensors that a forward keeps is not there",
    "checkpoint around": "statistics of BatchNorm are counted once, as by the plan",
}
