"""The engine of autograd: its nodes, its backwards, its order, and hooks on what it saves."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor


def current_autograd_node() -> Any:
    """Return the node that the engine is running in this thread, or None."""
    return torch._C._current_autograd_node()


def latest_sequence_nr() -> int:
    """Return the sequence number of the autograd node that was made last in this thread."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


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


def set_grad_mode(enabled: bool) -> None:
    """Switch grad mode, without the object that `torch.set_grad_enabled` makes for it."""
    torch._C._set_grad_enabled(enabled)


def keeps_graph() -> bool:
    """Return whether the running backward has retain_graph set."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_backward() -> int:
    """Return a unique number of the running backward in this thread; -1 outside of backwards."""
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


@contextlib.contextmanager
def without_hooks_of_leaves(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable hooks on gradients of these tensors: a loop's own, and those of optimizers."""
    both = ((t._backward_hooks, t._post_accumulate_grad_hooks) for t in tensors)
    tables: list[Any] = [table for hooks in both for table in hooks if table]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def nodes_from(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of autograd to which gradients of these flow, each once."""
    stack = list(dict.fromkeys(roots))
    seen = set(stack)
    for node in stack:  # grows while it is walked
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)


def leaves_behind(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves to which gradients of these results flow."""
    nodes = nodes_from(t.grad_fn for t in tensors if t.grad_fn is not None)
    return [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]


@contextlib.contextmanager
def gradients_kept(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Put back the gradients of these leaves; inside they have none at first."""
    kept = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in kept:
            leaf.grad = gradient


@functools.cache
def firing_order(count: int, before: Literal["node", "leaf", "nothing"]) -> tuple[int, ...]:
    """Return the order in which the engine visits the leaves of one node.

    They have equal priority in the engine's heap, so the order is found by a trial. The node gives
    the first of its gradients to what is `before` them: another node, or another leaf.
    """
    fired: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [torch.empty(0, requires_grad=True, device="cpu") for _ in range(count)]
        for number, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, n=number: fired.append(n))
        token = torch.empty(0, requires_grad=before != "nothing", device="cpu")
        parts = [[], leaves] if before == "node" else [leaves]
        for part in parts:
            token = _Trial.apply(token, *part)  # type: ignore[no-untyped-call]
        run_backward([token], [torch.empty(0, device="cpu")])
    return tuple(fired)


class _Trial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *leaves: Tensor) -> Tensor:
        ctx.count = len(leaves)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.empty(0, device="cpu") for _ in range(ctx.count)))
