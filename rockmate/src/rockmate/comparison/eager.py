"""The eager twin: a copy of the module whose plain step gives the expected bits and the peak.

The twin's parameters are new leaves on the same memory, and its buffers are copies. So hooks,
optimizers and gradients of the user's are not affected. Its step gives eager's activation peak and
the bits with which the planned module is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.device import RngState
from rkgb.elements import flatten, same_bits
from rkgb.engine import Sample, trace_memory
from rkgb.graphs import autocast_as
from rkgb.module_state import PythonRandom
from rkgb.recording import answering, as_written
from rkgb.safeguards import without_traces
from rkgb.torch_api import Modes, gradients_kept, leaves_behind, placed_parameters, run_backward
from rockmate.comparison.fingerprint import Fingerprints
from rockmate.comparison.values import Values
from rockmate.errors import RockmateError, UnsupportedModuleError

GRADIENT = "the gradient of "
Keep = Literal["values", "fingerprints", "nothing"] | Values


@dataclass(frozen=True)
class StepResult:
    """The results of one forward and backward."""

    outputs: list[Any]  # tensors, their fingerprints, or what `Values` gives
    gradients: dict[str, Any]
    buffers: dict[str, Any]
    stream: RngState
    peak_bytes: int  # in requested bytes
    allocated_peak_bytes: int  # in whole blocks of the allocator
    timeline: tuple[tuple[float, int], ...]
    released_bytes: int  # that earlier steps had left: no room for this one, so in the peaks


def run_step(
    call: Any, twin: nn.Module, sample: Sample, *, keep: Keep = "values", losses: bool = True
) -> StepResult:
    """Run `call` on the sample, and its backward on the twin's leaves, metering the memory.

    With `losses`, only scalars get gradients if some outputs are scalars. Gradients of the outputs
    are pseudo-random but fixed. Complete parameter gradients are moved into buffers that were
    allocated beforehand, so that the peak contains only activations and their gradients. What the
    module's buffers have grown by is resident from now on, and not in the peak either. The random
    state is restored. Kept values are on the host; fingerprints take almost no memory.
    """
    sample, device = sample.detached(), sample.device
    results = _Results(twin, sample, keep)
    before_bytes = _bytes_of_buffers(twin)
    stream, python = RngState.save(device), PythonRandom(lends=True)

    def run(_span: Any) -> None:
        # The module itself asks these tensors what a planned step has asked the user's.
        asked = answering(sample.tensors) if call is twin else nullcontext()
        with asked, as_written():  # otherwise BatchNorm in a checkpoint would count the step twice
            result = flatten(call(*sample.args, **sample.keywords))[0]
        wanting = [t for t in result if isinstance(t, Tensor) and t.requires_grad]
        # A returned parameter gets its gradient from the loss, not from the step.
        wanting = [t for t in wanting if not t.is_leaf] or wanting
        trained = losses_among(wanting) if losses else wanting
        lets_go = len(trained) < len(wanting)
        results.take(result, copied=lets_go)
        if lets_go:  # training by a loss drops the other outputs
            result.clear()
        del wanting
        try:
            seed_backward(trained, {*map(id, results.leaves.values())})
        except (RkgbError, RockmateError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if call is not twin:
                raise
            raise UnsupportedModuleError(
                f"the backward of {type(twin).__name__} fails in plain PyTorch, too, when called "
                f"like this: {' '.join(str(error).split())} Mend this first; a state that it keeps "
                "from an earlier step has to be detached."
            ) from error

    try:
        with Modes(), results, without_traces():
            trace = trace_memory(run, device)
        end = RngState.save(device)
    finally:
        stream.restore()
        python.restore()
    grown_bytes = max(0, _bytes_of_buffers(twin) - before_bytes)
    return StepResult(
        outputs=results.host_outputs(),
        gradients=results.gradients,
        buffers=results.buffers(),
        stream=end,
        peak_bytes=trace.lasting_peak_bytes - grown_bytes,
        allocated_peak_bytes=trace.allocated_peak_bytes + trace.released_bytes - grown_bytes,
        timeline=trace.timeline,
        released_bytes=trace.released_bytes,
    )


def _bytes_of_buffers(module: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for b in module.buffers())


class _Results:
    """The results of a step, taken when they are complete, into memory allocated beforehand."""

    def __init__(self, twin: nn.Module, sample: Sample, keep: Keep) -> None:
        self.twin, self.keep = twin, keep
        self.leaves: dict[str, Tensor] = {
            f"parameter '{n}'": p for n, p in placed_parameters(twin) if p.requires_grad
        }
        for place, leaf in enumerate(sample.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.leaves[f"input {place}"] = leaf
        self.gradients: dict[str, Any] = dict.fromkeys(self.leaves)
        self.outputs: list[Any] = []
        self._fingerprints = Fingerprints()
        self._handles: list[Any] = []
        self._space: dict[str, Tensor] = {}
        if keep == "values":
            space = {n: torch.empty_like(leaf, device="cpu") for n, leaf in self.leaves.items()}
            self._space = space

    def __enter__(self) -> None:
        for name, leaf in self.leaves.items():
            leaf.grad = None
            hook: Any = functools.partial(self._move, name)
            hook.only_watches = True  # so that it runs as a step without hooks does
            self._handles.append(leaf.register_post_accumulate_grad_hook(hook))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _move(self, name: str, leaf: Tensor) -> None:
        if leaf.grad is not None and self.keep == "values":
            space = self._space[name]
            is_sparse = leaf.grad.is_sparse
            self.gradients[name] = (
                space.zero_().add_(leaf.grad.cpu()) if is_sparse else space.copy_(leaf.grad)
            )
        elif leaf.grad is not None:
            self.gradients[name] = self._of(f"{GRADIENT}{name}", leaf.grad)
        leaf.grad = None

    def take(self, outputs: Sequence[Any], *, copied: bool = False) -> None:
        """Keep outputs, or copies of their values if the step has to drop them."""
        if self.keep == "values":
            own = (t.detach() if isinstance(t, Tensor) else t for t in outputs)
            self.outputs = [t.clone() if copied and isinstance(t, Tensor) else t for t in own]
        else:
            self.outputs = [self._of(f"output {k}", value) for k, value in enumerate(outputs)]

    def host_outputs(self) -> list[Any]:
        if self.keep != "values":
            return self.outputs
        return [t.cpu() if isinstance(t, Tensor) else t for t in self.outputs]

    def buffers(self) -> dict[str, Any]:
        if self.keep == "values":
            return {n: b.detach().cpu().clone() for n, b in self.twin.named_buffers()}
        return {n: self._of(f"buffer '{n}'", b.detach()) for n, b in self.twin.named_buffers()}

    def _of(self, name: str, value: Any) -> Any:
        if isinstance(self.keep, Values):
            return self.keep.of(name, value)
        return self._fingerprints.of(value) if self.keep == "fingerprints" else None


def losses_among(outputs: list[Tensor]) -> list[Tensor]:
    """Return the scalar outputs, by which a model is trained, or all outputs if there are none."""
    return [t for t in outputs if t.dim() == 0] or outputs


def seed_backward(outputs: Sequence[Tensor], own: Collection[int]) -> None:
    """Run the backward as in training: from a scalar directly, from a tensor through a loss.

    The gradient that starts a backward is held to its end, so the gradient of a scalar output is
    held here too. A tensor's gradient comes from the user's loss and is freed after its use, so
    here a Function makes it. Its values are pseudo-random but fixed. It has the strides of the
    output, unless these have gaps or overlaps. A tensor that is returned twice has one gradient,
    because autograd would add two in memory that no plan counts. Leaves elsewhere than those with
    the ids `own` (a weight in a global variable) have the gradients afterwards that they had.
    """
    once = {id(t): t for t in outputs}.values()
    roots = [t for t in once if t.dim() == 0]
    tensors = [t for t in once if t.dim() > 0]
    del outputs, once
    if tensors:
        roots.append(_Seed.apply(*tensors))  # type: ignore[no-untyped-call]
    ones = [torch.ones_like(t) for t in roots]
    others = (leaf for leaf in leaves_behind(roots) if id(leaf) not in own)
    # As in training, the autocast region ends before the backward.
    with autocast_as(None), gradients_kept(others):
        run_backward(roots, ones)


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


def named_results(step: StepResult) -> dict[str, Any]:
    """Return outputs, gradients and buffers by their names in messages."""
    found = {f"output {place}": value for place, value in enumerate(step.outputs)}
    found.update({f"{GRADIENT}{key}": value for key, value in step.gradients.items()})
    found.update({f"buffer '{key}'": value for key, value in step.buffers.items()})
    return found


def differences(eager: StepResult, ours: StepResult) -> list[str]:
    """Return the names of outputs, gradients and buffers with other bits."""
    theirs, given = named_results(eager), named_results(ours)
    differing = [name for name, value in theirs.items() if not same_bits(value, given.get(name))]
    if len(eager.outputs) != len(ours.outputs):
        differing.insert(0, "the number of outputs")
    if not eager.stream.equals(ours.stream):
        differing.append("the random stream after the step")
    return differing
