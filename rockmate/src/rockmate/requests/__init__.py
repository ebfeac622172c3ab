"""From a request to a plan.

Gets a `Request`, which is a call of a module with known plans; gives a `Planned`. Read request.py
(the call, recorded on first use), then sources.py: the sources of plans, in order. These are
follow.py with resized.py and versions.py (plans derived from known ones), saved_plan.py and
identity.py (files, and the identity of a recording), ranks.py (one plan for all ranks) and anew.py
with within_blocks.py (a new plan).
"""

from rockmate.requests.anew import eager_peak_bytes
from rockmate.requests.ranks import is_follower, sharing
from rockmate.requests.request import Request, Source
from rockmate.requests.saved_plan import plan_file_of
from rockmate.requests.sources import GivenFile, given_file, planned_for, sources_of

__all__ = [
    "GivenFile",
    "Request",
    "Source",
    "eager_peak_bytes",
    "given_file",
    "is_follower",
    "plan_file_of",
    "planned_for",
    "sharing",
    "sources_of",
]
