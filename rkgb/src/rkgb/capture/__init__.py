"""From a module and a sample to one recorded step, or to an error that says where and why not.

Gets a module and a `Sample`; gives a `BasicGraph`. Read record.py (which submodules become opaque
calls) and ways.py (the options of all attempts, and of one), then step.py (one step from start to
end) with twin.py (the copy that runs), externals.py (what it finds), backward.py and hooks.py.
sizes.py records without memory. numbered.py records a second time to make numbers of the call
unspecialised. look.py compares another recording with the one that a plan was made from.
"""

from rkgb.capture.backward import AskedKind
from rkgb.capture.hooks import may_run_again
from rkgb.capture.look import look_again
from rkgb.capture.numbered import for_any_number, for_same_numbers
from rkgb.capture.record import make_B
from rkgb.capture.sizes import (
    SizedStep,
    outputs_without_content,
    record_other_backward,
    record_sizes,
)
from rkgb.capture.twin import Memo, geometry_of, twin_of

__all__ = [
    "AskedKind",
    "Memo",
    "SizedStep",
    "for_any_number",
    "for_same_numbers",
    "geometry_of",
    "look_again",
    "make_B",
    "may_run_again",
    "outputs_without_content",
    "record_other_backward",
    "record_sizes",
    "twin_of",
]
