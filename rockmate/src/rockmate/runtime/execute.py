"""Run a compiled step under autograd: the user writes `loss.backward()` and nothing else.

The forward runs at once, below autograd. Its outputs are connected to a rail, a chain of small
Functions whose backwards advance the backward program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rkgb.elements import Restart, named_apart
from rkgb.torch_api import apply_function, has_saved_hooks, straight_to_kernels
from rockmate.runtime.backwards import Backwards, Variant
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.shared_casts import note_casts
from rockmate.runtime.outputs import OutputsHeld
from rockmate.runtime.steps.hung_step import HungStep
from rockmate.runtime.steps.inner_results import InnerResults
from rockmate.runtime.steps.joint_step import JointStep
from rockmate.runtime.steps.running_step import RunningStep, refuse_create_graph
from rockmate.runtime.steps.split_step import SplitStep

# Gets the external values, and the tensors that Python may read which runs again for the backward.
# Gives a function that returns the name of one whose content has changed, or ''.
KeepContents = Callable[
    [Executable, Mapping[str, Tensor], Mapping[str, Tensor]], Callable[[], str] | None
]


class Executor(Backwards):
    """Runs forwards with the executable for the expected kind of backward."""

    def __call__(
        self,
        external: Mapping[str, Tensor],
        variant: Variant,
        model: nn.Module | None = None,
        numbers: Sequence[Any] = (),
        keep: KeepContents | None = None,
    ) -> list[Tensor]:
        """Run the forward and return the outputs, connected to autograd.

        `variant` is called in the backward if it is of another kind. `numbers` are the leaves of
        the call without its tensors, for unspecialised numbers. With `keep`, the backward checks
        the contents of the tensors from which it recomputes.
        """
        executable = self.expected
        kind: type[RunningStep] = RunningStep
        if executable.outputs.flows:
            kind = SplitStep if executable.kind.is_split else JointStep
        step = kind(self, executable, external, variant, numbers)
        if executable.casts.leaves:
            note_casts(step)
        values = list(executable.read_externals(external))
        step.remember_start(values)
        if executable.runs_python:
            step.model = model
        elif keep is not None:
            step.contents = keep(executable, external, {})
        with straight_to_kernels(), step.on_model():
            outputs, step.saved = executable.compiled.forward(values, *executable.taken(numbers))
        step.python = self.python_of(executable, model)  # with what the forward has set itself
        if executable.seen_writes:  # kernels below autograd do not count writes
            increment_version(executable.read_seen_writes(external))
        step.remember_versions(external)
        if keep is not None and executable.runs_python:  # they may write to it
            step.contents = keep(executable, external, _read_by_python(step.saved))
        if executable.outputs.leaving and not self.has_warned:
            names = executable.program.outputs
            step.outputs_held = OutputsHeld(
                {names[k]: outputs[k] for k in executable.outputs.leaving}
            )
        step.remember_outputs(outputs)
        rail = step.rail = step.laid.rail(external)
        passed = step.pass_to_hooks() if has_saved_hooks() else ()
        if isinstance(step, HungStep):
            found = step.hang(outputs, passed)
        else:
            found = list(apply_function(_Outputs, step, outputs, passed, rail.token))
        if places := executable.outputs.inner:
            name = executable.basic.model_name
            step.inner = InnerResults(name, rail, [found[at] for at in places])
        return found


def _read_by_python(saved: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors that a recomputation of Python may read, by name."""
    found = [value.tensors for value in saved if isinstance(value, Restart)]
    return named_apart(pair for tensors in found for pair in tensors.items())


class _Outputs(torch.autograd.Function):
    """Returns the outputs; its backward passes their gradients to the step."""

    @staticmethod
    def forward(
        ctx: Any, step: RunningStep, made: list[Tensor], passed: Sequence[Tensor], token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        if passed:
            ctx.save_for_backward(*passed)
        ctx.step, ctx.token = step, token.detach()
        # Fresh views, because autograd attaches this Function to returned tensors. A saved tensor
        # with it would keep the Function, and so the step, alive for ever.
        outputs = tuple([tensor.detach() for tensor in made])
        made.clear()
        if plain := step.executable.outputs.plain:
            ctx.mark_non_differentiable(*(outputs[place] for place in plain))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph()
        if ctx.step.passed is not None:
            ctx.step.refuse_twice()  # before autograd refuses it in its words
            ctx.step.take_back(ctx.saved_tensors)
        ctx.step.start(grads)
        return None, None, None, ctx.token
