"""Groups the modules of a sequential module into stages, by running them on a sample.

A boundary between two stages is a tensor that schedules keep, drop and recompute. It must not be a
pure view of the boundary before it, because its bytes would be counted twice. The next module must
not overwrite it, because recomputation needs its value. Modules that would break these rules join
the stage that allocated the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rotor.errors import InPlaceInputError, StageError
from rotor.runtime.boundary import Layout, Tensors, is_differentiable, unpack, versions
from rotor.runtime.stages import CodeStage, pack_output

_SAMPLE = -1  # the index that stands for the sample


def join_modules(
    modules: list[tuple[str, nn.Module]], sample: Tensors, layout: Layout
) -> list[CodeStage]:
    """Group the modules into stages, each as short as the rules for boundaries allow.

    `Flatten`, `Identity` and `Dropout(0)` return a view of their input. They join the stage before
    them, or the first stage if they come first. A module that overwrites its input joins the stage
    that made the input, together with all modules in between.

    Raises:
        InPlaceInputError: a module overwrites the sample (a copy of the caller's).
        StageError: a module fails, or returns something other than tensors.
    """
    inputs = tuple(tensor.detach().clone() for tensor in sample)
    makers = {_memory(tensor): _SAMPLE for tensor in inputs}
    starts = [0]
    only_views = True  # so far
    for index, (name, module) in enumerate(modules):
        overwritten, outputs, layout = _observe(CodeStage((name,), (module,)), inputs, layout)
        first = min((makers[memory] for memory in overwritten), default=index)
        is_view = all(_memory(tensor) in makers for tensor in outputs)
        if first == _SAMPLE:
            raise _overwrites_sample(name)
        if first < index:
            starts = [start for start in starts if start <= first]
        elif not is_view and not only_views:
            starts.append(index)
        only_views = only_views and is_view
        # While the inputs are alive no other tensor can have got their memory.
        makers = {_memory(tensor): makers.get(_memory(tensor), index) for tensor in outputs}
        inputs = outputs
    groups = [
        modules[start:end] for start, end in zip(starts, [*starts[1:], len(modules)], strict=True)
    ]
    return [CodeStage(tuple(n for n, _ in g), tuple(m for _, m in g)) for g in groups]


def call_stage(
    code: CodeStage, inputs: Tensors, layout: Layout, *, recording: bool
) -> tuple[Tensors, Layout]:
    """Run a stage; errors name it.

    Raises:
        InPlaceInputError: it overwrites its input, and did not when stages were joined.
        StageError: it fails, or returns something other than tensors.
    """
    before = versions(inputs)
    with torch.set_grad_enabled(recording):
        outputs = _run(code, inputs, layout)
    if versions(inputs) != before:
        raise InPlaceInputError(
            f"stage {code.name} overwrites its input, which other stages still need, in some runs "
            f"and not in others. Let it do so always, or never.",
            code.name,
        )
    return outputs


def _run(code: CodeStage, inputs: Tensors, layout: Layout) -> tuple[Tensors, Layout]:
    try:
        value = code(unpack(inputs, layout))
    except Exception as error:
        raise StageError(
            f"stage {code.name} failed on the output of the stages before it: "
            f"{type(error).__name__}: {error}. Check that the module runs on this sample.",
            code.name,
        ) from error
    return pack_output(value, code)


def _observe(code: CodeStage, inputs: Tensors, layout: Layout) -> tuple[list[int], Tensors, Layout]:
    """Run a module; return the addresses of the inputs that it has written to, and its output."""
    memories = [_memory(tensor) for tensor in inputs]
    values = [tensor.clone() for tensor in inputs]
    before = versions(inputs)
    with torch.enable_grad():
        outputs, next_layout = _run(code, tuple(_writable(tensor) for tensor in inputs), layout)
    overwritten = [
        memory
        for memory, tensor, value, old, new in zip(
            memories, inputs, values, before, versions(inputs), strict=True
        )
        if value.numel() and (old != new or not _same_values(tensor, value))
    ]
    return overwritten, tuple(tensor.detach() for tensor in outputs), next_layout


class _NonLeaf(torch.autograd.Function):
    """Returns a leaf as the result of an operation, which may be overwritten; copies nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as another stage would pass it: same memory and version, but no leaf."""
    if not is_differentiable(tensor):
        return tensor.detach()
    found: torch.Tensor = _NonLeaf.apply(  # type: ignore[no-untyped-call]
        tensor.detach().requires_grad_()
    )
    return found


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_values(now: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the values are equal. Some kernels write without raising the version."""
    return torch.equal(now, value) or bool(((now == value) | (now.isnan() & value.isnan())).all())


def _overwrites_sample(name: str) -> InPlaceInputError:
    return InPlaceInputError(
        f"stage {name} overwrites the input that the whole module is given, which belongs to the "
        f"caller and is needed for recomputation. Use inplace=False in stage {name}: at this place "
        f"the results are the same.",
        name,
    )
