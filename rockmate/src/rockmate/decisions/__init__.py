"""Roots that decide by values: their own Python runs, and what it calls runs planned.

Gets a model whose recording says that it, or a large part of it, must run whole; gives a step in
which the submodules that it calls, its *blocks*, keep less than they would, all within one budget.
Read dressing.py (calls of submodules led elsewhere, while a call of the root runs), recomputed.py
(a call that keeps nothing), blocks.py (the blocks of a sample's step, and ways to run them),
step_plan.py (one way for every call), choosing.py (which), report.py, then forward.py (the door).
"""

from rockmate.decisions.forward import DecidingForward

__all__ = ["DecidingForward"]
