"""Which modules of a sequential module form a stage: seen by running them on a sample.

A boundary between two stages is a tensor that schedules keep, drop and make again. None may lie
behind a pure view, which would be counted twice, nor before a module that overwrites what it gets:
the value that others need again would be gone. Such modules join the stage that made the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rotor.errors import InPlaceInputError, StageError
from rotor.runtime.boundary import Layout, Tensors, is_differentiable, unpack, versions
from rotor.runtime.stages import CodeStage, pack_output

_SAMPLE = -1  # what stands for the sample where a module's index is asked for


def join_modules(
    modules: list[tuple[str, nn.Module]], sample: Tensors, layout: Layout
) -> list[CodeStage]:
    """Group the modules into stages, each as short as the rules for boundaries allow.

    `Flatten`, `Identity` or a `Dropout(0)` hand on the memory they got, and join the stage before
    them, or the next one at the very beginning. A module that overwrites its input joins the stage
    that made it, with all modules in between: mostly the layer before it.

    Raises:
        InPlaceInputError: a module overwrites the sample, which is given as a copy.
        StageError: a module fails, or returns something else than tensors.
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
    """Run a stage; say which one it was if it fails.

    Raises:
        InPlaceInputError: it overwrites its input, as it did not when stages were joined.
        StageError: it fails, or returns something else than tensors.
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
    """Run a module and return which memory of its inputs it has written to, and its output."""
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


class _Hand(torch.autograd.Function):
    """Hands on a leaf as the result of a computation, which may be overwritten; copies nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, with the same version counter, as another stage would hand it on."""
    if not is_differentiable(tensor):
        return tensor.detach()
    found: torch.Tensor = _Hand.apply(  # type: ignore[no-untyped-call]
        tensor.detach().requires_grad_()
    )
    return found


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_values(now: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the values are equal; kernels may write without raising the version."""
    return torch.equal(now, value) or bool(((now == value) | (now.isnan() & value.isnan())).all())


def _overwrites_sample(name: str) -> InPlaceInputError:
    return InPlaceInputError(
        f"stage {name} overwrites the input that the whole module is given, which belongs to the "
        f"caller and is needed for recomputation. Use inplace=False in stage {name}: at this place "
        f"the results are the same.",
        name,
    )
