"""Modes that see operations and calls, and tensors without content."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.torch_api.private_names import WITHOUT_CONTENT, refuse_missing


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


# Modes under which tensors have no values, or are traced.
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def shares_parametrizations(model: torch.nn.Module) -> bool:
    """Return whether calls share what parametrizations of this model compute."""
    return parametrize._cache_enabled > 0 and any(map(parametrize.is_parametrized, model.modules()))


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


def asks_content(error: BaseException) -> bool:
    """Return whether an error is about reading a tensor without content."""
    kind = type(error)
    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return kind.__module__.startswith("torch._subclasses") and kind.__name__ in names


def mode_of(tensor: Tensor | None) -> Any:
    """Return the mode of a tensor without content; None for others."""
    return getattr(tensor, "fake_mode", None)


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
def operations_unwatched() -> Iterator[None]:
    """While active, modes that see operations of this thread are off.

    Torch computes some backwards by other operations where such a mode is on.
    """
    dispatch = torch.utils._python_dispatch._pop_mode_temporarily
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_dispatch_stack()):
            stack.enter_context(dispatch())
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While active, modes that see operations and calls of this thread are off."""
    function = torch.overrides._pop_mode_temporarily
    with contextlib.ExitStack() as stack:
        stack.enter_context(operations_unwatched())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(function())
        yield
