"""Guards: what a recording takes for granted of Python.

Gets the functions that run while a step is recorded; gives the places that the user's read
(variables of modules and of functions around, defaults, attributes), and looks at these again.
Read code_watch.py (which functions run), on loads.py (what a function loads), doors.py (what it
reads through functions written in C) and owners.py (whose it is), then sources.py (the places that
are read), and watched.py (what a value counts as, and whether it is the same still), on worth.py,
entries.py (dicts) and holding.py (what values hold, by kind).
"""

from rkgb.guards.code_watch import CodeWatch, nothing_watched
from rkgb.guards.doors import Door
from rkgb.guards.loads import ANY
from rkgb.guards.owners import is_users
from rkgb.guards.sources import ReadInBackward, Source, Sources
from rkgb.guards.watched import Watched, content_of
from rkgb.guards.worth import Kept, Named, Same

__all__ = [
    "ANY",
    "CodeWatch",
    "Door",
    "Kept",
    "Named",
    "ReadInBackward",
    "Same",
    "Source",
    "Sources",
    "Watched",
    "content_of",
    "is_users",
    "nothing_watched",
]
