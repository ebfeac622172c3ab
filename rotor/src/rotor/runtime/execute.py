"""Run a schedule on real tensors: stages as they are, or as one `torch.autograd.Function` each.

A stage that keeps everything runs unchanged. A stage that is recomputed becomes a Function of the
stage's input and parameters. Autograd itself then carries the gradients from stage to stage,
accumulates those of parameters, and calls their hooks. Autograd does not hold what is kept between
forward and backward. A `Session`, one per training step, holds the boundary tensors and the small
autograd graphs that the schedule asks for.

Gradients of a parameter are added in autograd's order: one by one, from the last use to the first.
A stage returns one gradient for all its uses. If an earlier stage uses a parameter several times,
it therefore gets the sum of the later stages and goes on adding to it.
Limitation: a stage cannot know of uses outside the chain. If the parameter is used after the chain
and several times in one stage, its gradient may differ from autograd's in the last bit.

Recomputation runs with the random state, the buffers, the autocast state and the train/eval flags
of the first run, and restores the present ones afterwards.

Limitation: state in plain Python attributes, and draws from `random` or numpy, are not restored.
This goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from rotor.errors import BackwardError, InPlaceInputError
from rotor.runtime.boundary import Layout, Tensors, is_differentiable, pack, unpack, versions
from rotor.runtime.gradients import stage_gradients
from rotor.runtime.program import Program
from rotor.runtime.rng import RngState, preserved_rng
from rotor.runtime.stages import (
    current_buffer,
    pack_output,
    parameters_of,
    replaced_buffers,
    training_flags,
)
from rotor.schedules.ops import ForwardEnableGrad, ForwardNoGrad, Op


@dataclass(slots=True)
class _Recorded:
    """The autograd graph of one stage: where gradients enter and where they leave."""

    edges: list[GradientEdge | None]
    leaves: list[torch.Tensor | GradientEdge]
    inputs: RecomputedInputs | None = None  # if the graph has not saved the stage's inputs (Fe*)


class RecomputedInputs:
    """Replaces a stage's inputs among its saved tensors, so that they can be recomputed."""

    def __init__(self, inputs: Tensors) -> None:
        self.now: Tensors | None = None  # set for the backward
        self._places = {
            (t.untyped_storage().data_ptr(), t.dtype): index
            for index, t in enumerate(inputs)
            if t.untyped_storage().nbytes()
        }

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _InputView:
        """Return the tensor, or the position of the input that it is or views."""
        place = self._places.get((tensor.untyped_storage().data_ptr(), tensor.dtype))
        if place is None:
            return tensor
        return _InputView(place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: torch.Tensor | _InputView) -> torch.Tensor:
        """Return the packed tensor, as a view of the recomputed inputs if it was an input."""
        if isinstance(kept, torch.Tensor):
            return kept
        assert self.now is not None
        base = self.now[kept.place]
        return base.as_strided(kept.size, kept.stride, kept.offset)


@dataclass(frozen=True, slots=True)
class _InputView:
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _FirstRun:
    """The state in which a stage ran first, for its recomputation."""

    rng: RngState | None
    buffers: list[torch.Tensor]
    versions: list[int]
    runs_left: int  # the last one may write to the buffers kept here


class Session:
    """One training step: the tensors and graphs that the schedule keeps alive."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._inputs: dict[int, Tensors] = {}
        self._layouts: dict[int, Layout] = {}
        self._recorded: dict[int, _Recorded] = {}
        self._needs: dict[int, tuple[bool, ...]] = {}
        self._first: dict[int, _FirstRun] = {}
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(device.type for device in program.devices)}
        }
        self._casts = any(enabled for enabled, _ in self._autocast.values())
        self._flags = {k: [m.training for m in program.modules[k]] for k in program.rerun}
        self._last_reuse = self._find_last_reuse()
        # Autograd adds gradients one by one, so no other gradient may overtake a waiting sum.
        self.plain = frozenset() if self._last_reuse else program.plain
        # Looked up at every step, because parameters may be replaced between steps.
        self.parameters = [
            [] if k in self.plain else parameters_of(modules)
            for k, modules in enumerate(program.modules)
        ]
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # of gradients of later stages

    def _find_last_reuse(self) -> dict[torch.Tensor, int]:
        """Return the shared parameters whose sum has to wait, with the stage that gets the sum."""
        found: dict[torch.Tensor, int] = {}
        if not any(stage.reused_parameters for stage in self.program.stages):
            return found  # the usual case; this runs at every step
        seen: set[torch.Tensor] = set()
        for k in reversed(range(len(self.program.stages))):
            parameters = parameters_of(self.program.modules[k])
            for index in self.program.stages[k].reused_parameters:
                if parameters[index] in seen:
                    found[parameters[index]] = k
            seen.update(parameters)
        return found

    def start(self, value: Any) -> Tensors:
        """Return the tensors of the chain's input."""
        tensors, self._layouts[0] = pack(value)
        return tensors

    def finish(self, tensors: Tensors) -> Any:
        """Return the chain's output as the last stage arranged it."""
        return unpack(tensors, self._layouts[len(self.program.stages)])

    def run_plainly(self, k: int, inputs: Tensors) -> Tensors:
        """Run stage k, which keeps everything, directly under autograd."""
        if not self._casts:
            return self._call(k, inputs)
        with self._autocast_state():
            return self._call(k, inputs)

    def forward_stage(self, k: int, inputs: Tensors, needs: tuple[bool, ...]) -> Tensors:
        """Run the first forward of stage k; `needs` are its needs_input_grad, inputs first."""
        op = self.program.forward[k]
        self._needs[k] = needs
        if not _forgets_input(op):
            self._inputs[k] = tuple(tensor.detach() for tensor in inputs)
        again = k in self.program.rerun
        before = self._remember(k) if again else None
        with self._autocast_state():
            outputs = self._run(op, inputs)
        if before is not None and before.rng is not None:
            drew_none = RngState.now(self.program.devices).same_as(before.rng)
            before.rng = None if drew_none else before.rng
        if before is not None:
            self._first[k] = before
        return outputs

    def backward_stage(
        self, k: int, grads: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the forwards before B(k), then B(k); return gradients of inputs and parameters."""
        if all(grad is None for grad in grads):
            return self._without_backward(k)
        for op in self.program.backward[k][:-1]:
            self._run_again(op)
        return self._run_backward(k, grads)

    def _remember(self, k: int) -> _FirstRun:
        stage = self.program.stages[k]
        return _FirstRun(
            rng=RngState.now(self.program.devices) if self.program.preserve_rng else None,
            buffers=[current_buffer(*where).clone() for where in stage.mutated_buffers],
            versions=[parameter._version for parameter in self.parameters[k]],
            runs_left=self.program.rerun[k],
        )

    def _run(self, op: Op, inputs: Tensors) -> Tensors:
        k = op.stage
        recording = isinstance(op, ForwardEnableGrad) and any(self._needs[k])
        if not recording and not (self.program.stages[k].always_record and any(self._needs[k])):
            # Parameters keep requires_grad, because it decides between some kernels.
            with torch.no_grad():
                outputs = self._call(k, tuple(t.detach() for t in inputs))
            return tuple(tensor.detach() for tensor in outputs)
        leaves = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(inputs, self._needs[k], strict=False)
        ]
        source = RecomputedInputs(inputs) if recording and _forgets_input(op) else None
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if source is not None:
                stack.enter_context(saved_tensors_hooks(source.pack, source.unpack))
            # As without rotor, a stage is given no leaf: hooks that ask which nodes autograd will
            # run, such as `register_multi_grad_hook`, cannot ask it of leaves in here.
            given = tuple(leaf.view_as(leaf) if leaf.requires_grad else leaf for leaf in leaves)
            outputs = self._call(k, given)
        if recording:
            edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
            self._recorded[k] = _Recorded(edges, _ends(leaves, emptied=source is not None), source)
        return tuple(tensor.detach() for tensor in outputs)

    def _call(self, k: int, inputs: Tensors) -> Tensors:
        code = self.program.stages[k].code
        before = versions(inputs)
        value = code(unpack(inputs, self._layouts[k]))
        if versions(inputs) != before:
            # Measured like this, it would have been joined to the stage before.
            raise InPlaceInputError(
                f"stage {code.name} has overwritten its input, which recomputation needs. It did "
                f"not do so when it was measured. Let it do so always, or never.",
                code.name,
            )
        outputs, self._layouts[k + 1] = pack_output(value, code)
        return outputs

    def _run_again(self, op: Op) -> None:
        k = op.stage
        inputs = self._inputs[k]
        with self._as_the_first_time(k):
            outputs = self._run(op, inputs)
        if _forgets_input(op):
            del self._inputs[k]
        if k + 1 < len(self.program.stages):
            self._inputs[k + 1] = outputs

    @contextmanager
    def _as_the_first_time(self, k: int) -> Iterator[None]:
        first, stage = self._first[k], self.program.stages[k]
        if [parameter._version for parameter in self.parameters[k]] != first.versions:
            raise BackwardError(
                f"stage {stage.code.name} has to be recomputed for its backward, and its "
                f"parameters have been changed since its forward. Call backward() before the "
                f"optimizer's step."
            )
        with ExitStack() as stack:
            if first.rng is not None:
                stack.enter_context(preserved_rng(self.program.devices))
                first.rng.restore()
            first.runs_left -= 1
            if stage.mutated_buffers:
                values = first.buffers
                if first.runs_left:
                    values = [value.clone() for value in values]
                stack.enter_context(replaced_buffers(list(stage.mutated_buffers), values))
            stack.enter_context(training_flags(self.program.modules[k], self._flags[k]))
            stack.enter_context(self._autocast_state())
            yield

    @contextmanager
    def _autocast_state(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._autocast.items():
                if enabled or torch.is_autocast_enabled(kind):
                    # No cache: a weight that was cast under no_grad must not reach a recorded run.
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield

    def _run_backward(
        self, k: int, grads: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        needs = self._needs[k]
        recorded = self._recorded.pop(k)
        inputs = self._inputs.pop(k)
        if recorded.inputs is not None:
            recorded.inputs.now = inputs
        self._inputs.pop(k + 1, None)
        self._first.pop(k, None)
        pairs = [
            (edge, grad)
            for edge, grad in zip(recorded.edges, grads, strict=True)
            if edge is not None and grad is not None
        ]
        variables = [*recorded.leaves, *self.parameters[k]]
        wanted = [v for v, need in zip(variables, needs, strict=True) if need]
        if not pairs or not wanted:
            return self._without_backward(k)
        edges, gradients = [edge for edge, _ in pairs], [grad for _, grad in pairs]
        for parameter in self.parameters[k]:
            if parameter in self._sums:
                edges.append(get_gradient_edge(parameter))
                gradients.append(self._sums.pop(parameter))
        del pairs
        results = iter(stage_gradients(edges, wanted, gradients))
        found = [next(results) if need else None for need in needs]
        self._keep_sums(k, found)
        return tuple(found)

    def _without_backward(self, k: int) -> tuple[torch.Tensor | None, ...]:
        """Return only the sums that later stages left for the parameters of stage k."""
        needs, parameters = self._needs[k], self.parameters[k]
        found: list[torch.Tensor | None] = [None] * (len(needs) - len(parameters))
        found += [self._sums.pop(parameter, None) for parameter in parameters]
        self._keep_sums(k, found)
        return tuple(found)

    def _keep_sums(self, k: int, found: list[torch.Tensor | None]) -> None:
        """Withhold from `found` the gradients to which an earlier stage adds several times."""
        if not self._last_reuse:
            return
        first = len(found) - len(self.parameters[k])
        for place, parameter in enumerate(self.parameters[k], first):
            grad, last = found[place], self._last_reuse.get(parameter, k)
            if grad is not None and last < k and self._is_reached(last, k):
                self._sums[parameter], found[place] = grad, None

    def _is_reached(self, earlier: int, k: int) -> bool:
        """Return whether gradients flow from stage k to an earlier one."""
        return all(
            any(self._needs[j][: len(self._needs[j]) - len(self.parameters[j])])
            for j in range(earlier + 1, k + 1)
        )


class _StageFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, session: Session, k: int, count: int, *tensors: torch.Tensor) -> Tensors:
        ctx.session, ctx.stage = session, k
        ctx.set_materialize_grads(False)
        outputs = session.forward_stage(k, tensors[:count], ctx.needs_input_grad[3:])
        detached = session.program.stages[k].detached_outputs
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(outputs) if i in detached or not is_differentiable(t))
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        session: Session | None = ctx.session
        if session is None:
            raise BackwardError(
                "the backward of this checkpointed step has already run, and what it needs is "
                "gone (retain_graph does not keep it). Run the forward again."
            )
        ctx.session = None
        return (None, None, None, *session.backward_stage(ctx.stage, grads))


def run_program(program: Program, value: Any) -> Any:
    """Return the output of the chain for `value`, ready for a plain backward."""
    session = Session(program)
    tensors = session.start(value)
    for k, parameters in enumerate(session.parameters):
        if k in session.plain:
            tensors = session.run_plainly(k, tensors)
        else:
            tensors = _StageFunction.apply(  # type: ignore[no-untyped-call]
                session, k, len(tensors), *tensors, *parameters
            )
    return session.finish(tensors)


def _forgets_input(op: Op) -> bool:
    return isinstance(op, ForwardNoGrad) or (isinstance(op, ForwardEnableGrad) and op.forget_input)


def _ends(leaves: list[torch.Tensor], *, emptied: bool) -> list[torch.Tensor | GradientEdge]:
    """Return where gradients leave a graph. With `emptied` the leaves give up their memory."""
    if not emptied:
        return list(leaves)
    ends: list[torch.Tensor | GradientEdge] = []
    for leaf in leaves:
        ends.append(get_gradient_edge(leaf) if leaf.requires_grad else leaf)
        leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return ends
