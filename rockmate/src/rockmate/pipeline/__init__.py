"""From a module, a sample and a budget to what runs its steps.

Gets a module, a sample and settings; gives a `Planned`, whose `run` is a forward within the budget.
Read plan_module.py (the whole road, phase by phase), network.py (recorded and measured) and
network_problem.py (as a problem), planned.py (compiled) with likely.py (for which gradients),
self_test.py (one step against plain PyTorch); then, for plans made before, identity.py (what a
recording is known by), saved_plan.py (to files and back), shelf.py (where plans lie), share.py (one
plan for all ranks).
"""

from rockmate.pipeline.plan_module import eager_peak_bytes, plan_module
from rockmate.pipeline.planned import Planned, compiled_part
from rockmate.pipeline.saved_plan import plan_file_of
from rockmate.pipeline.share import is_follower, sharing
from rockmate.pipeline.shelf import Shelf, shelf_of

__all__ = [
    "Planned",
    "Shelf",
    "compiled_part",
    "eager_peak_bytes",
    "is_follower",
    "plan_file_of",
    "plan_module",
    "sharing",
    "shelf_of",
]
