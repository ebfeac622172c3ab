"""Oracles for graphs: run one and compare with the module, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.copies import Copies
from rkgb.elements import own_copy, same_bits
from rkgb.elements.op import Ref
from rkgb.elements.sample import Sample
from rkgb.elements.target import GradientCut
from rkgb.elements.trees import flatten
from rkgb.graphs.basic import BasicGraph, external_values
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.module_state.start_of_call import StartOfCall
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from rkgb.run.program.places import Step
from rkgb.run.program.source import Callee, CompiledStep, compile_step, plain_callee
from rkgb.run.program.statements import Give, StepProgram
from rkgb.torch_api.private.autograd import straight_to_kernels


def gradients_of_module(
    model: nn.Module, sample: Any, *, kwargs: Mapping[str, Any] | None = None
) -> list[Tensor | None]:
    """Return autograd's gradients of the sum of all results, for parameters, then for inputs."""
    given = Sample.of(model, sample, kwargs)
    given = given.with_leaves(tuple(map(own_copy, given.leaves)))  # it may write to them
    results = flatten(model(*given.args, **given.kwargs))[0]
    outputs = [t for t in results if isinstance(t, Tensor)]
    outputs = list({id(t): t for t in outputs if t.requires_grad}.values())
    wanted = leaves_that_want(model, given)
    if not outputs or not wanted:
        return [None] * len(wanted)
    ones = [torch.ones_like(t) for t in outputs]
    return list(torch.autograd.grad(outputs, wanted, ones, allow_unused=True))


def gradients_of_graph(
    sg: SimplifiedGraph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    steps: Sequence[Step] | None = None,
) -> list[Tensor | None]:
    """Return the same gradients, from the generated program of `steps`.

    Without `steps`, the whole forward runs twice before the backward.
    """
    count = len(sg.nodes)
    forwards: list[Step] = [("F", k) for k in range(count)]
    backwards: list[Step] = [
        ("B", k) for k in reversed(range(count)) if sg.nodes[k].backward or sg.nodes[k].hand_overs
    ]
    program = lower_step(sg, steps or [*forwards, *forwards, *backwards])
    return run_program(sg, program, model, sample, kwargs=kwargs)[1]


def run_program(
    sg: SimplifiedGraph,
    program: StepProgram,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    copies: Copies | None = None,
    callee: Callee = plain_callee,
) -> tuple[list[Any], list[Tensor | None]]:
    """Run a step; return the leaves of the result, and the gradients of the sum of all of them.

    The gradients are those of parameters, then of inputs.
    """
    compiled = compile_step(sg, program, callee, copies)
    basic = sg.basic
    given = Sample.of(model, sample, kwargs)
    external = external_values(basic, model, given.leaves)
    found: dict[int, Tensor] = {}
    for out in sg.outputs:  # a parameter or input that is returned as it is
        if isinstance(out, Ref) and out.name in external and external[out.name].requires_grad:
            found[id(external[out.name])] = torch.ones_like(external[out.name])
    with straight_to_kernels(), torch.enable_grad():
        outputs, saved = compiled.forward([external[name] for name in program.externals])
    made = {**external, **dict(zip(program.outputs, outputs, strict=True))}
    results = [made[out.name] if isinstance(out, Ref) else out for out in sg.outputs]
    with straight_to_kernels(), torch.no_grad():
        pairs = zip(basic.roots, basic.tangent_names, strict=True)
        tangents = [torch.ones_like(made[root]) for root, name in pairs if name is not None]
        for give, gradients in handed_over(basic, compiled, saved, tangents, made):
            for (leaf, _), gradient in zip(give.gradients, gradients, strict=True):
                key = id(external[leaf])
                found[key] = found[key] + gradient if key in found else gradient
            gradients.clear()
    return results, [found.get(id(t)) for t in leaves_that_want(model, given)]


def handed_over(
    basic: BasicGraph,
    compiled: CompiledStep,
    saved: list[Any],
    tangents: list[Tensor],
    made: Mapping[str, Tensor],
) -> Iterator[tuple[Give, list[Tensor]]]:
    """Run a backward of the sum of all outputs `made`; yield what leaves get, as a list to empty.

    Parts of the gradients of outputs are added up and sent back, as autograd does.
    """
    wholes: dict[str, Tensor] = {}
    for op in basic.cuts:
        assert isinstance(op.target, GradientCut)
        if op.target.from_outside:
            wholes[op.target.root] = torch.ones_like(made[op.target.root])
    del made
    running, received = compiled.backward(saved, tangents), None
    for give in compiled.program.gives:
        gradients, received = running.send(received), None
        if not give.output:
            yield give, gradients
            continue
        for part in gradients:
            whole = wholes.get(give.output)
            wholes[give.output] = part if whole is None else whole + part
        gradients.clear()
        received = [wholes.pop(give.output)] if give.receives else None
    for _ in running:
        raise AssertionError("the program hands over more than it says")


def leaves_that_want(model: nn.Module, sample: Sample) -> list[Tensor]:
    """Return the parameters, then the inputs, that require a gradient; each once."""
    inputs = [t for t in sample.tensors if t.requires_grad]
    tensors = [*(p for p in model.parameters() if p.requires_grad), *inputs]
    return list({id(t): t for t in tensors}.values())


def assert_same_gradients(
    sg: SimplifiedGraph, model: nn.Module, sample: Any, *, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Assert that the graph's program, as recorded and as it is run, gives autograd's gradients.

    The module's buffers and the random stream are as before afterwards.

    Raises:
        AssertionError: a gradient differs, or only one of the two has it.
    """
    device = Sample.of(model, sample, kwargs).device
    for graph in (sg, runnable(sg).graph):

        def ours(graph: SimplifiedGraph = graph) -> Sequence[Tensor | None]:
            return gradients_of_graph(graph, model, sample, kwargs=kwargs)

        assert_autograds_gradients(ours, model, sample, device, kwargs=kwargs)


def assert_autograds_gradients(
    ours: Callable[[], Sequence[Tensor | None]],
    model: nn.Module,
    sample: Any,
    device: torch.device,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Assert that `ours()` gives the gradients of the module itself, from the same state.

    The module's buffers and the random stream are as before afterwards.

    Raises:
        AssertionError: a gradient differs, or only one of the two has it.
    """
    start = StartOfCall(model, device)
    try:
        expected = gradients_of_module(model, sample, kwargs=kwargs)
        start.restore()
        found = ours()
    finally:
        start.restore()
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine is None) == (theirs is None), f"gradient {place} exists only on one side"
        assert mine is None or same_bits(mine, theirs), f"gradient {place} differs from autograd's"
