"""Records everything that runs in a step: operations, values, and their lines in the user's code.

Gets a running step; gives its operations and facts about the values between them. Read recorder.py
(recording an operation), on reads.py (what Python reads of values), values.py (their names),
kernels.py (schemas), repeated.py (skipping repeated kernels), places.py (lines of the
user's code), sizes.py (in less memory), facts.py (what tensors are asked for), and watch.py (calls
that are no operations).
"""

from rkgb.recording.facts import answering
from rkgb.recording.sizes import LiveBytes
from rkgb.recording.watch import as_written, tensors_of, transparent_checkpoints

__all__ = ["LiveBytes", "answering", "as_written", "tensors_of", "transparent_checkpoints"]
