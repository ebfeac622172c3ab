"""The private names of torch that this package needs, each once, with its purpose."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from rkgb.errors import CompilerMissingError
from rkgb.torch_api.private_names import (
    AMONG_PROCESSES,
    TO_COMPILE,
    WITHOUT_CONTENT,
    refuse_missing,
)

pytree = _pytree  # flattens and rebuilds containers


class DispatchMode(TorchDispatchMode):
    """Sees every operation below autograd, without loading torch's compiler.

    At the first use of a mode torch would load it, which takes longer than a recording.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, and return what it gives."""
        raise NotImplementedError


def current_autograd_node() -> Any:
    """Return the node that the engine is running in this thread, or None."""
    return torch._C._current_autograd_node()


def latest_sequence_nr() -> int:
    """Return the sequence number of the autograd node that was made last in this thread."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


# Modes under which tensors have no values, or are traced.
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_usual_backward = torch.autograd.backward  # recordings forbid it while one runs


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run the backward from roots with gradients of their shapes, like `torch.autograd.backward`.

    The latter loads torch's symbolic shapes to compare shapes, which takes a third of a second.
    """
    if any(type(tensor) is not Tensor for tensor in (*roots, *gradients)):
        _usual_backward(roots, gradients)
        return
    from torch.autograd.graph import _engine_run_backward

    given = (tuple(roots), tuple(gradients), False, False, ())
    _engine_run_backward(*given, allow_unreachable=True, accumulate_grad=True)


def profiler_is_on() -> bool:
    """Return whether a profiler is active in this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def memory_profile(*, operations: bool) -> Iterator[Callable[[], Any]]:
    """Profile the allocator; afterwards the yielded function returns the profiler's raw results.

    Without `operations` only memory and named spans are recorded, because recording small
    operations takes a fifth of their time. There is only one profiler: if it was on, it restarts
    afterwards.
    """
    from torch._C._profiler import RecordScope
    from torch.autograd import profiler

    untyped: Any = profiler
    was_on = profiler_is_on()
    session = untyped.profile(profile_memory=True, use_kineto=True)
    activities = session.kineto_activities
    untyped._prepare_profiler(session.config(create_trace_id=True), activities)
    scopes = set() if operations else {RecordScope.USER_SCOPE}
    untyped._enable_profiler(session.config(), activities, scopes)
    found: list[Any] = []
    try:
        yield lambda: found[0]
    finally:
        found.append(untyped._disable_profiler())
        if was_on:  # its owner will stop it
            untyped._prepare_profiler(session.config(create_trace_id=True), activities)
            untyped._enable_profiler(session.config(), activities)


def _keys_above_kernels() -> Any:
    key = torch._C.DispatchKey
    above = ("Autograd", "Autocast")
    names = [n for n in dir(key) if n.startswith(above) and n != "AutogradFunctionality"]
    keys = torch._C.DispatchKeySet(key.ADInplaceOrView)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(key, name))
    return keys


_ABOVE_KERNELS = _keys_above_kernels()


def straight_to_kernels() -> AbstractContextManager[Any]:
    """While active, operations bypass autograd and autocast; views and versions are not tracked."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


def back_to_autograd() -> AbstractContextManager[Any]:
    """While active inside `straight_to_kernels`, autograd records operations again."""
    c = torch._C
    excluded = c._dispatch_tls_local_exclude_set() - _ABOVE_KERNELS
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded)


def apply_function(function: Any, *args: Any) -> Any:
    """Run a `torch.autograd.Function` without defaults, outside of torch.func's transforms.

    Its own `apply` checks both, which takes as long as a small operation.
    """
    return super(torch.autograd.Function, function).apply(*args)


def set_version(tensor: Tensor, version: int) -> None:
    """Set the version counter of a tensor."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def set_sequence_nr(node: Any, number: int) -> None:
    """Set the sequence number of an autograd node, which decides its order in the engine."""
    node._set_sequence_nr(number)


def binding_places() -> tuple[Any, ...]:
    """Return the namespaces of torch's generated Python bindings, the fastest first."""
    c = torch._C
    return (c.TensorBase, c._VariableFunctions, c._nn, c._linalg, c._fft, c._special)  # type: ignore[attr-defined]


def set_grad_mode(enabled: bool) -> None:
    """Switch grad mode, without the object that `torch.set_grad_enabled` makes for it."""
    torch._C._set_grad_enabled(enabled)


def keeps_graph() -> bool:
    """Return whether the running backward has retain_graph set."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_backward() -> int:
    """Return a unique number of the running backward in this thread."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call this once, when the running backward in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


@functools.cache
def nodes_outlive_tensors() -> bool:
    """Return whether who holds the node of a Function keeps it usable, as with newer torch.

    With torch 2.11, only tensors and nodes above it do so.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = _Nothing.apply(torch.empty(0, device="cpu", requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def is_to_run(node: Any) -> bool:
    """Return whether the running backward in this thread includes an autograd node."""
    return bool(torch._C._will_engine_execute_node(node))


def asked_of_backwards() -> Iterator[Any]:
    """Yield what running backwards are asked for gradients of, by `inputs` or as all they give."""
    codes = {_usual_backward.__code__, torch.autograd.grad.__code__}
    frames = [*sys._current_frames().values()]  # autograd may run this in another thread
    for frame in frames:
        if frame.f_code in codes:
            inputs = frame.f_locals["inputs"]
            yield from inputs if isinstance(inputs, Sequence) else (inputs,)
        if frame.f_back is not None:
            frames.append(frame.f_back)


@contextlib.contextmanager
def without_cast_cache() -> Iterator[None]:
    """While active, autocast's cache of casts is off."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def is_cast_anew(tensor: Tensor) -> bool:
    """Return whether autocast casts it at every use; it caches only casts of leaves."""
    is_kept = tensor.is_leaf and not tensor._is_view()
    return tensor.requires_grad and torch.is_autocast_cache_enabled() and not is_kept


try:
    from torch._C._dynamo.guards import dict_version as _dict_version
except ImportError:  # another version of torch
    _dict_version = None  # type: ignore[assignment]


def same_kinds(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Return a function that tests whether these tensors still have their present kinds.

    A kind is shape, strides, dtype, device and `requires_grad`. The function also returns False if
    grad mode or autocast has changed. It takes 0.1 µs per tensor, a tenth of reading each in
    Python.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if check(*tensors):
            return functools.partial(check, *tensors)
    except (ImportError, TypeError, RuntimeError, SystemError):
        pass  # another version of torch, or tensors without strides
    kinds = [_kind(tensor) for tensor in tensors]
    return lambda: [_kind(tensor) for tensor in tensors] == kinds


def dict_versions(tables: Sequence[Any]) -> list[Any] | None:
    """Return what changes whenever dicts are written, for each, or None if torch has none.

    It takes 0.05 µs per dict, whatever its size. From Python 3.12 on, torch does not count that an
    empty dict becomes the copy of another one; lengths tell it.
    """
    try:
        versions = map(_dict_version, tables)
        if sys.version_info >= (3, 12):
            return list(zip(versions, map(len, tables), strict=True))
        return list(versions)
    except (TypeError, RuntimeError):
        return None


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, strides


# The first returns the precision in which kernels of a backend ("generic", "cuda", "mkldnn")
# compute an operation ("all", "matmul", "conv", "rnn"), or its default. The second sets it.
fp32_precision = torch._C._get_fp32_precision_getter
set_fp32_precision: Callable[[str, str, str], object] = torch._C._set_fp32_precision_setter


def kernel_flags() -> tuple[Hashable, ...]:
    """Return the global flags that choose kernels and types, without autocast."""
    # `with torch.device(...)` is a mode of functions, and asking for the device is slow.
    elsewhere = torch._C._len_torch_function_stack() and str(torch.get_default_device())
    return (torch.get_default_dtype(), elsewhere, *backend_flags())


def backend_flags() -> tuple[Hashable, ...]:
    """Return those of them that choose kernels."""
    return tuple([read() for read in _FLAGS])


def named_kernel_flags() -> dict[str, str]:
    """Return the same flags in words, each by its name."""
    found = {"default dtype": str(torch.get_default_dtype())}
    found.update((name, str(read())) for name, read in _NAMED_FLAGS.items())
    return found


def _readers_of_flags() -> dict[str, Callable[[], Hashable]]:
    names: tuple[str, ...] = (
        *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled"),
        *("_get_cudnn_sdp_enabled", "_get_overrideable_sdp_enabled"),
        *("_get_math_sdp_allow_fp16_bf16_reduction", "_get_deterministic_algorithms"),
        *("_get_deterministic_algorithms_warn_only", "_get_mkldnn_enabled"),
        *("_get_mkldnn_deterministic", "_get_cudnn_enabled", "_get_cudnn_benchmark"),
        *("_get_cudnn_deterministic", "_get_nnpack_enabled"),
    )
    has_cuda = torch.backends.cuda.is_built()  # reading all of them takes a while
    if has_cuda:
        names += (
            "_get_cublas_allow_fp16_reduced_precision_reduction",
            "_get_cublas_allow_bf16_reduced_precision_reduction",
            "_get_cublas_allow_fp16_accumulation",
        )
    found: dict[str, Callable[[], Hashable]] = {
        name.removeprefix("_get_"): getattr(torch._C, name)
        for name in names
        if hasattr(torch._C, name)
    }
    # The older names (allow_tf32, float32_matmul_precision) set these too, but cannot be read if
    # these were set in another way.
    for backend in ("mkldnn", "cuda") if has_cuda else ("mkldnn",):
        for kind in ("matmul", "conv", "rnn"):
            read = functools.partial(fp32_precision, backend, kind)
            found[f"{backend}_{kind}_precision"] = read
    return found


_NAMED_FLAGS = _readers_of_flags()
_FLAGS = tuple(_NAMED_FLAGS.values())


def is_transforming() -> bool:
    """Return whether a call is not only for its values and gradients.

    It may be for a transform, a trace, an export, forward-mode differentiation, or a mode that
    changes the meaning of torch's functions.
    """
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (current_dispatch_modes() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS)))
        or forward_ad._current_level >= 0
        or (torch._C._len_torch_function_stack() > 0 and _changes_functions())
    )


def _changes_functions() -> bool:
    """Return whether a mode sees torch's functions; `with torch.device(...)` does not count."""
    places = range(torch._C._len_torch_function_stack())
    modes = (torch._C._get_function_stack_at(place) for place in places)
    return any(type(mode) is not DeviceContext for mode in modes)


def is_abstract(value: Any) -> bool:
    """Return whether a value is a tensor without content, or of a tracer."""
    return isinstance(value, Tensor) and type(value).__name__ in ("FakeTensor", "FunctionalTensor")


def has_saved_hooks() -> bool:
    """Return whether there are hooks on saved tensors, as those of `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_in_checkpoint() -> bool:
    """Return whether the hooks on saved tensors are a checkpoint's, which runs a forward again."""
    hooks = saved_hooks()
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def saved_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the two hooks that see what autograd saves here, packing and unpacking, if any."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def may_change_saved() -> bool:
    """Return whether hooks on saved tensors may give other values back (compression).

    Those of checkpoints and of `save_on_cpu` give back what they were given.
    """
    hooks = saved_hooks()
    return hooks is not None and hooks[0].__module__.partition(".")[0] not in {"torch", "rkgb"}


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Disable hooks on saved tensors, which transforms of functions refuse."""
    autograd, found = torch._C._autograd, []
    while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
        found.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(found):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def unfrozen_flags() -> AbstractContextManager[None]:
    """Allow `torch.backends.*.flag = value` after `torch.backends.disable_global_flags()`."""
    context: AbstractContextManager[None] = getattr(
        torch.backends, "__allow_nonbracketed_mutation"
    )()
    return context


@contextlib.contextmanager
def without_hooks_after_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable post-accumulate hooks of these tensors, such as those of optimizers."""
    tables = [table for t in tensors if (table := t._post_accumulate_grad_hooks)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def group_store() -> Any:
    """Return the store in which the processes of the default group leave words for each other."""
    refuse_missing(AMONG_PROCESSES, "to exchange plans between processes")
    return torch.distributed.distributed_c10d._get_default_store()


# Queries of tensors without content that go through the dispatcher; they are no operations of a
# step.
ASKS_GEOMETRY = frozenset(
    (
        *("size", "stride", "numel", "storage_offset", "dim", "device", "layout"),
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous"),
        *("is_strides_like_format", "is_non_overlapping_and_dense"),
    )
)


def without_content() -> AbstractContextManager[Any]:
    """While active, new tensors have sizes and devices and no content; the mode is returned."""
    refuse_missing(WITHOUT_CONTENT, "to record a step by sizes")
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode()
    return mode


def with_content() -> AbstractContextManager[Any]:
    """Leave `without_content` for a while."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


def weak_storage(storage: Any) -> Any:
    """Return a weak reference to a storage; `expired()` tells whether it has been freed."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def asks_content(error: BaseException) -> bool:
    """Return whether an error is about reading a tensor without content."""
    kind = type(error)
    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return kind.__module__.startswith("torch._subclasses") and kind.__name__ in names


def mode_of(tensor: Tensor | None) -> Any:
    """Return the mode of a tensor without content; None for others."""
    return getattr(tensor, "fake_mode", None)


def allocator_settings() -> str:
    """Return the settings of the device's allocator as text: `expandable_segments:True`."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is None:  # in torch 2.11; there they count as the environment gives them
        return os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return str(ask())


def current_cuda_stream(index: int) -> int:
    """Return a number of the current stream of a device, without the object that torch makes."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def keep_cuda_busy(cycles: int) -> None:
    """Make the current CUDA stream wait, so that the host runs ahead of it."""
    torch.cuda._sleep(cycles)


def dispatch_mode_stack() -> list[Any]:
    """Return the modes that see operations of this thread."""
    return list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def current_dispatch_modes() -> int:
    """Return the number of modes that see operations of this thread."""
    return int(torch._C._len_torch_dispatch_stack())


def changing_modes() -> list[str]:
    """Return the type names of modes of this thread that may change results of operations.

    A mode with `only_watches = True` changes nothing. Torch's own modes only watch, or trace;
    tracing is tested elsewhere.
    """
    found = [type(m) for m in dispatch_mode_stack() if not getattr(m, "only_watches", False)]
    return [kind.__name__ for kind in found if not kind.__module__.startswith("torch.")]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While active, modes that see operations and calls of this thread are off."""
    dispatch = torch.utils._python_dispatch._pop_mode_temporarily
    function = torch.overrides._pop_mode_temporarily
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_dispatch_stack()):
            stack.enter_context(dispatch())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(function())
        yield


def sdpa_priority_order() -> tuple[int, ...]:
    """Return the order in which kernels of attention are tried."""
    return tuple(map(int, torch._C._get_sdp_priority_order()))


def set_sdpa_priority_order(order: tuple[int, ...]) -> None:
    """Set the order in which kernels of attention are tried."""
    torch._C._set_sdp_priority_order(list(order))


def convolves_in_onednn(image: Tensor, weight: Tensor, *settings: Any) -> bool:
    """Return whether a convolution of these runs in oneDNN; their content is not read.

    `settings` are stride, padding, dilation, transposed, output padding, groups.
    """
    backend = torch._C._select_conv_backend(image, weight, None, *settings, None)
    # oneDNN's backend does not always have a name.
    return not backend.name.startswith(("Slow", "Nnpack", "Winograd", "Empty"))


# ---------------------------------------------------------------------- inductor, loaded when used


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a mode in which tensors have no memory.

    Without a shape environment, inductor would not use its cache on disk.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def refuse_missing_compiler(device: torch.device) -> None:
    """Refuse to compile for a device for which inductor has no compiler.

    Raises:
        CompilerMissingError: it says what to install.
    """
    refuse_missing(TO_COMPILE, "for compile=True")
    if device.type == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise CompilerMissingError(
                "compile=True needs a C++ compiler on a CPU, and none was found: install g++ or "
                "clang++, or name one in the environment variable CXX. Without compile=True none "
                "is needed."
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise CompilerMissingError(
            f"compile=True needs Triton on '{device}', and it does not work here: pip install "
            "triton. Without compile=True it is not needed."
        )


class AnySize:
    """A symbolic size of a traced function, and the sizes for which its code is valid."""

    def __init__(self, mode: Any, hint: int) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        self._shapes = mode.shape_env
        source = ConstantSource("any_size")
        self._symbol = self._shapes.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        self.symint = self._shapes.create_symintnode(self._symbol, hint=hint, source=source)

    def is_valid(self, size: int) -> bool:
        """Return whether the guards from tracing and compiling hold for a size."""
        if self._symbol in self._shapes.replacements:  # it was specialised to a number
            return False
        if size not in self._shapes.var_to_range[self._symbol]:
            return False
        given = {self._symbol: size}
        return all(guard.expr.xreplace(given) == True for guard in self._shapes.guards)  # noqa: E712  (of sympy)

    def of(self, number: Any, size: int) -> int:
        """Return the value of a number, which may depend on the symbol, at a size."""
        if not isinstance(number, torch.SymInt):
            return int(number)
        return int(number.node.expr.xreplace({self._symbol: size}))


def traced_for_inductor(mode: Any, function: Callable[..., Any], *inputs: Sequence[Tensor]) -> Any:
    """Return the functional graph of `function(*inputs)` in inductor's operations.

    `inputs` are two lists of fake tensors of `mode`, primals and tangents. The partitioner uses
    these names to find the inputs of the forward. The first primal may be a symbol, `AnySize`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = dispatch_functionalize(function, FunctionalTensorMode())
    table = dict(select_decomp_table())
    # It scatters, so overlapping windows would be added in any order; without it inductor gathers.
    table.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)

    def primals_and_tangents(primals: Any, tangents: Any) -> Any:
        return functional(primals, tangents)

    with torch.no_grad(), mode, enable_python_dispatcher():
        graph: Any = make_fx(primals_and_tangents, decomposition_table=table)(*inputs)
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@contextlib.contextmanager
def under_inductor(mode: Any, options: Any) -> Iterator[None]:
    """While active, graphs with fake tensors of this mode can be partitioned and compiled."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.virtualized import V

    with compile_lock, config.patch(options), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        yield


def partitioned(
    joint: Any,
    inputs: Sequence[Any],
    results: int,
    static: Sequence[int],
    is_heavy: Callable[[Any], bool],
    *,
    rebuilds: bool,
) -> tuple[Any, Any]:
    """Return the graphs of the forward, whose first outputs are `results`, and of the backward.

    With `rebuilds`, the backward recomputes everything except heavy operations and large sums;
    otherwise torch decides what to save. Heavy operations never run twice.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    device = inputs[-1].device
    joint = _recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=device)
    for node in joint.graph.nodes:
        if node.op == "call_function" and is_heavy(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with config.patch(activation_memory_budget=1.0, aggressive_recomputation=rebuilds):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            inputs,
            compiler="inductor",
            num_fwd_outputs=results,
            static_lifetime_input_indices=list(static),
        )
    return forward, backward


def compiled_by_inductor(
    graph: Any, inputs: Sequence[Any], static: Sequence[int], kept: int, kind: str
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return the compiled function of a graph, which takes a list and empties it.

    The first `kept` results have the graph's layouts; inductor may choose those of the others.
    `kind` is "forward", "backward" or "inference".
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    (output,) = graph.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(kept))
    # Makes vector widths part of the key of inductor's cache. Otherwise its loops for wide vectors
    # could be used on a CPU with narrow ones, and leave out elements.
    threads, vectors = torch.get_num_threads(), str(pick_vec_isa())
    graph.meta["rkgb"] = (kept, threads, vectors, repr(kernel_flags()))
    code: Any = compile_fx_inner(
        graph,
        list(inputs),
        static_input_idxs=list(static),
        is_backward=kind == "backward",
        is_inference=kind == "inference",
    )
    run: Callable[[list[Tensor]], Sequence[Tensor]] = code.current_callable or code
    return run
