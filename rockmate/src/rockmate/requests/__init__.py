"""From a request to a plan.

Gets a `Request`, which is a call of a module with known plans; gives a `Planned`. Read request.py
(the call, recorded on first use), then sources.py: the sources of plans, in order. These are
resized.py with versions.py (plans derived from known ones), saved_plan.py and identity.py (files,
and the identity of a recording), ranks.py with exchange.py (one plan for all ranks) and anew.py (a
new plan).
"""
