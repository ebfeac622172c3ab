"""Uses of torch beyond its documented interface.

Gets nothing from the rest of the package; gives torch's private functions under names of ours, the
flags by which kernels are chosen, functions of torch replaced for a while, prints and warnings of
one thread, the code that compiled functions were made from, and FLOP formulas that torch has none
for. When torch changes, read private_names.py, which proves that each name is there and that torch
calls what is replaced, and private/, which alone imports private modules; then kernel_choice.py and
patches.py.
"""

from rkgb.torch_api.by_values import (
    EXTRA_FLOP_FORMULAS,
    FlopCounter,
    TakingMost,
    flops_of,
    noting_calls,
)
from rkgb.torch_api.compiled_code import compiled_modules, is_in_compiled_code, is_optimized
from rkgb.torch_api.kernel_choice import KernelChoice, RecomputingAs, running_a_forward, with_flags
from rkgb.torch_api.modes_left import Modes
from rkgb.torch_api.object_heads import has_in_head, heads_of, items_of_all
from rkgb.torch_api.patches import has_global_hooks, without_global_hooks
from rkgb.torch_api.private.autograd import (
    apply_function,
    asked_of_backwards,
    at_end_of_backward,
    current_backward,
    firing_order,
    gradients_kept,
    has_saved_hooks,
    is_in_checkpoint,
    is_to_run,
    keeps_graph,
    latest_sequence_nr,
    leaves_behind,
    may_change_saved,
    nodes_outlive_tensors,
    run_backward,
    set_sequence_nr,
    set_version,
    straight_to_kernels,
    without_hooks_of_leaves,
    without_saved_hooks,
)
from rkgb.torch_api.private.flags import (
    Settings,
    is_cast_anew,
    kernel_flags,
    named_kernel_flags,
    settings_of,
)
from rkgb.torch_api.private.memory import any_is_freed
from rkgb.torch_api.private.modes import (
    DispatchMode,
    changing_modes,
    current_dispatch_modes,
    dispatch_mode_stack,
    is_abstract,
    is_transforming,
    operations_unwatched,
    shares_parametrizations,
    unwatched,
)
from rkgb.torch_api.private.tables import dict_versions, group_store, same_kinds
from rkgb.torch_api.private_names import refuse_unused
from rkgb.torch_api.tensor_facts import placed_parameters, unusual_facts, written_on

__all__ = [
    "EXTRA_FLOP_FORMULAS",
    "DispatchMode",
    "FlopCounter",
    "KernelChoice",
    "Modes",
    "RecomputingAs",
    "Settings",
    "TakingMost",
    "any_is_freed",
    "apply_function",
    "asked_of_backwards",
    "at_end_of_backward",
    "changing_modes",
    "compiled_modules",
    "current_backward",
    "current_dispatch_modes",
    "dict_versions",
    "dispatch_mode_stack",
    "firing_order",
    "flops_of",
    "gradients_kept",
    "group_store",
    "has_global_hooks",
    "has_in_head",
    "has_saved_hooks",
    "heads_of",
    "is_abstract",
    "is_cast_anew",
    "is_in_checkpoint",
    "is_in_compiled_code",
    "is_optimized",
    "is_to_run",
    "is_transforming",
    "items_of_all",
    "keeps_graph",
    "kernel_flags",
    "latest_sequence_nr",
    "leaves_behind",
    "may_change_saved",
    "named_kernel_flags",
    "nodes_outlive_tensors",
    "noting_calls",
    "operations_unwatched",
    "placed_parameters",
    "refuse_unused",
    "run_backward",
    "running_a_forward",
    "same_kinds",
    "set_sequence_nr",
    "set_version",
    "settings_of",
    "shares_parametrizations",
    "straight_to_kernels",
    "unusual_facts",
    "unwatched",
    "with_flags",
    "without_global_hooks",
    "without_hooks_of_leaves",
    "without_saved_hooks",
    "written_on",
]
