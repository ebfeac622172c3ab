"""Forms that a search leaves out, because a fault that they show is known and open.

An entry goes when its fault does. `python -m fuzz --all` leaves nothing out.
"""

from __future__ import annotations

KNOWN = {
    "checkpoint around": "a forward that changes what it computes with, and runs twice: parts that "
    "call autograd inside, or that run whole behind a running value, get other gradients",
}
