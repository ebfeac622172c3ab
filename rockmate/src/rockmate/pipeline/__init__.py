"""From a module, a sample and a budget to what runs its steps.

Gets a module, a sample and settings; gives a `Planned`. Read plan_module.py (the whole road, phase
by phase) and within_blocks.py (plans that are tried, where an allocator hands out whole blocks);
then what serves again: follow.py (a recording that is like a known one), resized.py (the same at
another size) and versions.py (for other gradients), identity.py (what a recording is known by),
saved_plan.py (to files and back), shelf.py (where plans lie), share.py (one plan for all ranks).
"""

from rockmate.pipeline.plan_module import eager_peak_bytes, plan_module
from rockmate.pipeline.saved_plan import plan_file_of
from rockmate.pipeline.share import is_follower, sharing
from rockmate.pipeline.shelf import Shelf, shelf_of

__all__ = [
    "Shelf",
    "eager_peak_bytes",
    "is_follower",
    "plan_file_of",
    "plan_module",
    "sharing",
    "shelf_of",
]
