"""From a request to a plan.

Gets a `Request`, which is a call of a module and what is known of others; gives a `Planned`. Read
request.py (the call, recorded when somebody looks), then sources.py: where plans come from, in the
order in which they are asked. The sources are follow.py with resized.py and versions.py (plans that
follow from known ones), saved_plan.py and identity.py (to files and back, and by what a recording
is known there), ranks.py (one plan for all ranks) and anew.py with within_blocks.py (from nothing).
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
