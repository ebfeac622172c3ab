"""Side effects that a recording would lose silently: they are refused, undone or kept.

Gets a module, before and after a forward; gives errors with module path and source line, and the
assignments that a plan repeats. Read refusals.py (found beforehand; errors about operations),
side_effects.py, assignments.py and settling.py (found by comparison), traces.py (what would
leave the process), other_threads.py (random numbers of other threads), and interrupts.py (a Ctrl-C
while something is put back).
"""

from rkgb.safeguards.interrupts import signals_wait
from rkgb.safeguards.other_threads import drawn_elsewhere, other_threads
from rkgb.safeguards.refusals import refuse_lazy_modules
from rkgb.safeguards.settling import Setting
from rkgb.safeguards.traces import without_traces

__all__ = [
    "Setting",
    "drawn_elsewhere",
    "other_threads",
    "refuse_lazy_modules",
    "signals_wait",
    "without_traces",
]
