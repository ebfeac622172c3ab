"""From a problem and a budget to a plan.

Gets a `Problem`, a budget in bytes and an effort; gives a `Plan`, or the smallest feasible budget.
Read portfolio.py (the planners and their order), search.py (one run), chain.py (block by block),
windows.py (parts of a plan), smallest_budget.py and squeeze.py, effort.py (limits of work), then
moving.py with arrivals.py and copy_times.py (storages that are elsewhere for a while),
module_options.py (one module of several) and resized.py (a plan at other sizes).
"""

from rockmate.planners.effort import EFFORTS
from rockmate.planners.portfolio import PLANNERS, plan
from rockmate.planners.resized import replan
from rockmate.planners.smallest_budget import minimum_peak

__all__ = ["EFFORTS", "PLANNERS", "minimum_peak", "plan", "replan"]
