"""What a recording would lose in silence: found, said where, and refused, undone or kept.

Gets a module, before and after a forward; gives errors with module path and source line, and the
assignments that a plan repeats. Read refusals.py (seen beforehand), side_effects.py, assignments.py
and settling.py (seen by comparing), other_threads.py (what these do meanwhile) and explain.py (what
is said of an operation that stopped it).
"""

from rkgb.safeguards.other_threads import drawn_elsewhere, other_threads
from rkgb.safeguards.refusals import refuse_lazy_modules
from rkgb.safeguards.settling import Setting

__all__ = ["Setting", "drawn_elsewhere", "other_threads", "refuse_lazy_modules"]
