"""Records everything that runs in a step: operations, values, and their lines in the user's code.

Gets a running step; gives its operations and facts about the values between them. Read recorder.py
(recording an operation), values.py and names.py (names of values), kernels.py (schemas),
repeated.py and blanks.py (skipping repeated kernels), places.py (lines of the user's code),
watch.py (calls that are no operations), and stops.py.
"""

from rkgb.recording.watch import as_written, transparent_checkpoints

__all__ = ["as_written", "transparent_checkpoints"]
