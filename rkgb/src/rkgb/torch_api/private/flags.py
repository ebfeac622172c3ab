"""Global flags that choose kernels and types."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._config_module import ConfigModule

Settings = ConfigModule  # modules of them: of torch's compiler, mostly


def settings_of(module: Settings) -> list[str]:
    """Return the names of what such a module sets, sorted; some have dots in them."""
    return sorted(module._config)


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


def unfrozen_flags() -> AbstractContextManager[None]:
    """Allow `torch.backends.*.flag = value` after `torch.backends.disable_global_flags()`."""
    context: AbstractContextManager[None] = getattr(
        torch.backends, "__allow_nonbracketed_mutation"
    )()
    return context


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
