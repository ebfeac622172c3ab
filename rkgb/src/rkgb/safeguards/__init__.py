"""What a recording would lose in silence: found, said where, and refused, undone or kept.

Gets a module, before and after a forward; gives errors with module path and source line, and the
assignments that a plan repeats. Read refusals.py (seen beforehand), side_effects.py and
assignments.py (seen by comparing), explain.py (what is said of an operation that stopped it).
"""

from rkgb.safeguards.refusals import refuse_lazy_modules

__all__ = ["refuse_lazy_modules"]
