"""Everything that runs, seen and written down: operations, values, and whose line made them.

Gets a running step; gives its operations and what is known of the values between them. Read
recorder.py (how an operation is written down), values.py on names.py (what goes by which name),
kernels.py (what a declaration says), repeated.py on blanks.py (what need not run again), places.py
(where in the user's code), watch.py (what no operation shows), and stops.py.
"""

from rkgb.recording.watch import as_written, transparent_checkpoints

__all__ = ["as_written", "transparent_checkpoints"]
