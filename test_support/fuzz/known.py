"""Forms that a search leaves out, because a fault that they show is known and open.

An entry goes when its fault does. `python -m fuzz --all` leaves nothing out.
"""

from __future__ import annotations

KNOWN = {
    "error at a weight": "where a hook of a weight raises, a gradient that the forward retains may "
    "not have come yet, which plain PyTorch has delivered before",
}
