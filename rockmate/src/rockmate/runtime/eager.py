"""The eager twin: what a step must compute, and how much memory it takes without us.

The twin shares the parameters' memory as fresh leaves, so no hook, optimizer or gradient of the
user's is touched, and owns copies of the buffers. Its step gives eager's activation peak and the
bits that the planned module is held to.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.engine import RngState, autocast_as, trace_memory
from rockmate.errors import SelfTestError


def detached_inputs(tree: Any) -> Any:
    """Return the inputs with every tensor a new leaf on the same memory."""
    made: dict[int, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return pytree.tree_map_only(Tensor, leaf, tree)


@dataclass(frozen=True)
class StepResult:
    """What one forward and backward computed."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    stream: RngState
    peak_bytes: int
    timeline: tuple[tuple[float, int], ...]


def run_step(
    call: Any,
    twin: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    keep_bits: bool = True,
) -> StepResult:
    """Run `call(*args, **kwargs)` and its backward on the twin's leaves, metering the memory.

    Gradients of the outputs are pseudo-random but fixed; parameter gradients are moved into buffers
    made beforehand as soon as they are complete, so that the peak holds activations and their
    gradients only. The random stream is put back.
    """
    args, kwargs = detached_inputs((args, dict(kwargs)))
    leaves: dict[str, Tensor] = {
        f"parameter '{n}'": p for n, p in twin.named_parameters() if p.requires_grad
    }
    for place, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[f"input {place}"] = leaf
    found: dict[str, Tensor | None] = dict.fromkeys(leaves)
    if keep_bits:
        space = {name: torch.empty_like(leaf) for name, leaf in leaves.items()}
    handles = []
    for name, leaf in leaves.items():

        def move(tensor: Tensor, name: str = name) -> None:
            if keep_bits and tensor.grad is not None:
                found[name] = space[name].copy_(tensor.grad)
            tensor.grad = None

        leaf.grad = None
        handles.append(leaf.register_post_accumulate_grad_hook(move))
    kept: list[Any] = []
    stream = RngState.save(device)

    def run(_span: Any) -> None:
        result = pytree.tree_leaves(call(*args, **kwargs))
        wanted = [t for t in result if isinstance(t, Tensor) and t.requires_grad]
        seed_backward(wanted)
        if keep_bits:
            kept.extend(t.detach() if isinstance(t, Tensor) else t for t in result)

    gc.collect()
    try:
        trace = trace_memory(run, device)
        end = RngState.save(device)
    finally:
        stream.restore()
        for handle in handles:
            handle.remove()
    buffers = {name: buffer.detach().clone() for name, buffer in twin.named_buffers()}
    return StepResult(kept, found, buffers, end, trace.peak_bytes, trace.timeline)


def seed_backward(outputs: Sequence[Tensor]) -> None:
    """Run backward as a user would: from a scalar directly, from a tensor through a loss.

    The gradient that starts a backward is held to its end, and so is that of a scalar output here.
    A tensor's gradient comes from a loss that the user computes, and is freed once it is used: it
    is made by a function in front of the output. Its values are pseudo-random but fixed, and it
    lies in memory as the output does, unless that has gaps or overlaps.
    """
    roots = [t for t in outputs if t.dim() == 0]
    tensors = [t for t in outputs if t.dim() > 0]
    del outputs
    if tensors:
        roots.append(_Seed.apply(*tensors))  # type: ignore[no-untyped-call]
    with autocast_as(None):  # as users do: the region ends before the backward
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.kinds = [(t.dtype, t.device, t.shape, _usual_strides(t)) for t in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        source = torch.Generator(ctx.kinds[0][1]).manual_seed(0)
        return tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device=device).normal_(
                generator=source
            )
            for dtype, device, shape, strides in ctx.kinds
        )


def _usual_strides(output: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(output, device="meta").stride())


def compare(eager: StepResult, ours: StepResult, name: str) -> None:
    """Hold our step to eager's bits.

    Raises:
        SelfTestError: an output, a gradient, a buffer or the random stream differs.
    """
    differing: list[str] = []
    if len(eager.outputs) != len(ours.outputs):
        differing.append("the number of outputs")
    for place, (a, b) in enumerate(zip(eager.outputs, ours.outputs, strict=False)):
        if not _equal(a, b):
            differing.append(f"output {place}")
    for key, gradient in eager.gradients.items():
        if not _equal(gradient, ours.gradients[key]):
            differing.append(f"the gradient of {key}")
    for key, buffer in eager.buffers.items():
        if not _equal(buffer, ours.buffers[key]):
            differing.append(f"buffer '{key}'")
    if not eager.stream.equals(ours.stream):
        differing.append("the random stream after the step")
    if differing:
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise SelfTestError(
            f"the planned {name} does not compute what eager PyTorch computes: "
            f"{', '.join(differing[:4])}{more} differ. It must not be used; please report the "
            "module. (Is its forward deterministic for equal inputs and random state?)"
        )


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    both_nan = (a != a) & (b != b)
    return bool(((a == b) | both_nan).all())
