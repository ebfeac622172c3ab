"""The private names of torch that are read or replaced here, and the proof that they are live.

A name that torch has dropped is an error where its feature is first used, which names version and
function. So is a function that is replaced and that torch no longer calls: what it was replaced for
would not happen, and other bits would be the first to tell.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from rkgb.errors import TraceError
from rkgb.torch_api.patches import Patches

TRIED = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")  # with which bits, bytes and recordings are tested

_C = "torch._C."
TO_RUN_STEPS = (  # all of them are there once torch is imported
    *(_C + name for name in ("DispatchKey", "DispatchKeySet", "_ExcludeDispatchKeyGuard")),
    *(_C + name for name in ("_TorchDispatchModeKey.__members__", "_current_autograd_node")),
    *(_C + name for name in ("_current_graph_task_id", "_will_engine_execute_node")),
    _C + "_create_function_from_graph",
    *(_C + "_autograd." + name for name in ("_get_current_graph_task_keep_graph",)),
    *(_C + "_autograd." + name for name in ("_top_saved_tensors_default_hooks",)),
    *(_C + "_autograd." + name for name in ("_unsafe_set_version_counter",)),
    *(_C + name for name in ("_functorch.peek_interpreter_stack", "_get_tracing_state")),
    *(_C + name for name in ("_get_dispatch_mode", "_get_function_stack_at", "_set_grad_enabled")),
    *(_C + name for name in ("_get_fp32_precision_getter", "_set_fp32_precision_setter")),
    *(_C + name for name in ("_get_sdp_priority_order", "_set_sdp_priority_order")),
    *(_C + name for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack")),
    *(_C + name for name in ("_profiler.RecordScope.USER_SCOPE", "_select_conv_backend")),
    *("torch.UntypedStorage._expired", "torch._conj", "torch._neg_view", "torch._ops.OpOverload"),
    "torch._tensor_str.get_printoptions",
    "torch.overrides._pop_mode_temporarily",
    "torch.autograd.Variable._execution_engine.queue_callback",
    *("torch.autograd._get_sequence_nr", "torch.autograd._profiler_enabled"),
    *("torch.autograd.forward_ad._current_level", "torch.autograd.graph._engine_run_backward"),
    *(f"torch.nn.modules.module._global_{h}_hooks" for h in ("forward_pre", "forward")),
    *(f"torch.nn.modules.module._global_{h}_hooks" for h in ("backward_pre", "backward")),
    "torch.nn.utils.parametrize._cache_enabled",
    *("torch.utils._device.DeviceContext", "torch.utils._pytree"),
    "torch.utils._config_module.ConfigModule",
    *(f"torch.utils._python_dispatch.{n}" for n in ("TorchDispatchMode", "_pop_mode_temporarily")),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
)
ON_CUDA = (_C + "_cuda_getCurrentRawStream", "torch.cuda._sleep")
WITHOUT_CONTENT = (
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
)
TO_COMPILE = (
    "torch._dispatch.python.enable_python_dispatcher",
    *("torch._dynamo.convert_frame.compile_lock", "torch._dynamo.source.ConstantSource"),
    "torch._functorch.config.patch",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    *("torch._guards.TracingContext", "torch._guards.tracing"),
    *("torch._inductor.compile_fx._recursive_joint_graph_passes", "torch._inductor.config"),
    "torch._inductor.compile_fx.compile_fx_inner",
    *("torch._inductor.cpp_builder.get_cpp_compiler", "torch._inductor.cpu_vec_isa.pick_vec_isa"),
    "torch._inductor.decomposition.select_decomp_table",
    "torch._inductor.virtualized.V.set_fake_mode",
    "torch._subclasses.functional_tensor.FunctionalTensorMode",
    "torch._subclasses.functional_tensor.dispatch_functionalize",
    "torch.utils._triton.has_triton",
)
AMONG_PROCESSES = ("torch.distributed.distributed_c10d._get_default_store",)
# Without them the same is done in a slower way.
IN_PLACE_OF_SLOWER = tuple(_C + f"_dynamo.guards.{n}" for n in ("TensorGuards", "dict_version"))


@functools.cache
def refuse_missing(names: tuple[str, ...], feature: str) -> None:
    """Refuse a feature that needs a name which this torch has not.

    Raises:
        TraceError: it says which.
    """
    for name in names:
        if not _is_there(name):
            raise TraceError(f"torch {torch.__version__} has no {name}, {_advice(feature)}")


def called_of(
    place: Any,
    names: Sequence[str],
    call: Callable[[], object],
    feature: str,
    stand_in: Callable[..., Any] = lambda *_, **__: None,
) -> str:
    """Return which of these functions of a module or class torch runs in a call of its own.

    Meanwhile `stand_in` is called in their place.

    Raises:
        TraceError: none of them, so that replacing it would do nothing.
    """
    for name in names:
        called: list[str] = []

        def noting(*args: Any, called: list[str] = called, name: str = name, **more: Any) -> Any:
            called.append(name)
            return stand_in(*args, **more)

        if hasattr(place, name):
            with Patches([(place, name, noting)]):
                call()
        if called:
            return name
    parts = getattr(place, "__module__", ""), place.__name__, names[-1]
    return refuse_unused(".".join(filter(None, parts)), feature)


def refuse_unused(name: str, feature: str) -> NoReturn:
    """Refuse a feature for which something is replaced that torch does not use.

    Raises:
        TraceError: always.
    """
    raise TraceError(f"torch {torch.__version__} does not use {name}, {_advice(feature)}")


def _advice(feature: str) -> str:
    tried = ", ".join(TRIED)
    return f"which rkgb needs {feature}. Use a version of torch that it was tried with: {tried}"


def _is_there(name: str) -> bool:
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


refuse_missing(TO_RUN_STEPS, "to record and run steps")
