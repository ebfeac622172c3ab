"""What a forward changes outside of its module: found, said where, and put back.

Gets the functions that run while a step is recorded. Read contents.py (what places held before),
on used_up.py (what changes by being used), held.py (what each kind of place holds) and reached.py
(what a value leads to); then known.py (the places that forwards were seen to change) and changes.py
(what one changes), on identities.py (whether it compares its own with what is there). readable.py
keeps what a second run of a part has to find there.
"""

from rkgb.outside.contents import Contents
from rkgb.outside.known import forget_computed
from rkgb.outside.readable import Readable

__all__ = ["Contents", "Readable", "forget_computed"]
