"""What graphs consist of: operations, facts about tensors, effects, and the arguments of a call.

Gets the arguments and results of calls; gives frozen facts. Read op.py (one operation), then
tensor_info.py (one tensor), numbers.py (unspecialised numbers of a call), trees.py and sample.py
(arguments and results flattened), effect.py (side effects of a forward), target.py (a target that
is no operation of torch's; where a gradient goes to autograd and comes back) and module_paths.py
(names of modules in a model).
"""

from rkgb.elements.effect import (
    Assertion,
    Assign,
    ContainerMutation,
    Effect,
    InputMutation,
    ObserverHook,
)
from rkgb.elements.module_paths import group_of, is_inside, is_inside_any, outermost
from rkgb.elements.numbers import Numbers
from rkgb.elements.op import BATCH_NORMS, CAST, Op, Ref
from rkgb.elements.sample import attribute_keyword, attribute_of, own_copy
from rkgb.elements.spread import is_running, settled
from rkgb.elements.target import Restart, running_on, target_of
from rkgb.elements.tensor_info import (
    TensorInfo,
    contiguous_strides,
    named_apart,
    same_bits,
    storage_id,
)
from rkgb.elements.trees import Structure, flatten

__all__ = [
    "BATCH_NORMS",
    "CAST",
    "Assertion",
    "Assign",
    "ContainerMutation",
    "Effect",
    "InputMutation",
    "Numbers",
    "ObserverHook",
    "Op",
    "Ref",
    "Restart",
    "Structure",
    "TensorInfo",
    "attribute_keyword",
    "attribute_of",
    "contiguous_strides",
    "flatten",
    "group_of",
    "is_inside",
    "is_inside_any",
    "is_running",
    "named_apart",
    "outermost",
    "own_copy",
    "running_on",
    "same_bits",
    "settled",
    "storage_id",
    "target_of",
]
