"""Saved tensors while a step is recorded: their content is given up at once.

New memory of the same layout replaces a saved tensor when the backward needs it. Kernels do not
depend on the content. So a step can be recorded whose activations would not fit. Only small
tensors, integers and booleans keep their content, because indices must be valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.tensor_info import storage_id
from rkgb.recording.recorder import Recorder
from rkgb.recording.repeated import Blanks, strided_bytes

# Tensors of at most this many elements keep their content: scalars that autograd wraps, scales,
# tables.
_SMALL = 16


@contextlib.contextmanager
def saving(recorder: Recorder) -> Iterator[None]:
    """While active, saved tensors are given up, and later replaced by new memory."""
    blanks = Blanks() if recorder.repeated is None else recorder.repeated.blanks

    def alone(tensor: Tensor, name: str | None) -> Tensor:
        """Return it without its history, which would keep a recording alive that is given up."""
        if tensor.grad_fn is None or type(tensor) is not Tensor:
            return tensor
        with recorder.paused():
            found = tensor.detach()
        if name is not None:
            recorder.names.bind(name, found, storage_id(found))
        return found

    def pack(tensor: Tensor) -> tuple[str | None, int, Tensor | tuple[Any, ...]]:
        small = tensor.numel() <= _SMALL or not (tensor.is_floating_point() or tensor.is_complex())
        name = recorder.name_of(tensor)
        if name is None or small or recorder.is_resident(name) or type(tensor) is not Tensor:
            return name, recorder.count, alone(tensor, name)
        return name, recorder.count, (tensor.size(), tensor.stride(), tensor.dtype)

    def unpack(packed: tuple[str | None, int, Tensor | tuple[Any, ...]]) -> Tensor:
        name, since, content = packed
        if name is not None:  # with hooks, autograd itself does not check versions
            recorder.refuse_overwritten(name, since)
        if isinstance(content, Tensor):
            return content
        assert name is not None
        size, stride, dtype = content
        recorder.claim(strided_bytes(size, stride, dtype))
        with recorder.paused(), torch.no_grad():
            content = blanks.make(size, stride, dtype, recorder.device)
            if recorder.repeated is None:
                blanks.fill(content)
        recorder.names.stand_in(name, content)
        return content

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
