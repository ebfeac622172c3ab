"""Guards: what a recording takes for granted of Python.

Gets the functions that run while a step is recorded; gives the places that the user's read
(variables of modules and of functions around, defaults, attributes), and looks at these again.
Read code_watch.py (which functions run), on loads.py (what a function loads), doors.py (what it
reads through functions written in C) and owners.py (whose it is), then sources.py (the places that
are read), and watched.py (what a value counts as, and whether it is the same still), on worth.py,
entries.py (dicts) and holding.py (what values hold, by kind). outside.py finds what a forward
changes there, on contents.py (what it held before) and identities.py (whether it compares its own
with it); readable.py keeps what a second run of a part has to find there.
"""

from rkgb.guards.code_watch import CodeWatch
from rkgb.guards.contents import Contents
from rkgb.guards.doors import Door
from rkgb.guards.loads import ANY
from rkgb.guards.owners import is_users
from rkgb.guards.readable import Readable
from rkgb.guards.sources import ReadInBackward, Source, Sources
from rkgb.guards.watched import Watched, content_of
from rkgb.guards.worth import Kept, Named, Same

__all__ = [
    "ANY",
    "CodeWatch",
    "Contents",
    "Door",
    "Kept",
    "Named",
    "ReadInBackward",
    "Readable",
    "Same",
    "Source",
    "Sources",
    "Watched",
    "content_of",
    "is_users",
]
