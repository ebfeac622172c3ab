"""Root modules with value-dependent control flow: their Python runs, and submodules run planned.

Gets a model that is, or mostly consists of, an opaque call; gives a step in which the submodules
that it calls, its *blocks*, save less, all within one budget. Read dressing.py (redirected calls of
submodules), recomputed.py (a call that saves nothing), blocks.py (a block, its calls and their
options), meeting.py (the step in which they are found), step_plan.py (one option for every
call), choosing.py (the choice), report.py, then forward.py (the entry).
"""

from rockmate.decisions.forward import DecidingModule

__all__ = ["DecidingModule"]
