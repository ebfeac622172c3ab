"""Oracles for graphs: run one and compare with the module; small modules that exercise traps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.basic import BasicGraph, bind_inputs, check_device, external_values
from rkgb.dataflow import DataFlowGraph
from rkgb.op import Op, Ref, map_refs
from rkgb.rng import RngState
from rkgb.run.program import Step, StepProgram, lower_step
from rkgb.run.source import compile_step, plain_callee
from rkgb.run.views import runnable
from rkgb.simplified import SimplifiedGraph
from rkgb.torch_private import straight_to_kernels

Graph = BasicGraph | DataFlowGraph | SimplifiedGraph


def run_graph(
    graph: Graph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> list[Any]:
    """Run the graph's operations and return the leaves of its result.

    `order` is any topological order of the graph's nodes; program order without it. Buffers are
    updated as the module would update them.
    """
    basic, groups, outputs = _parts(graph)
    leaves = tuple(pytree.tree_leaves(bind_inputs(sample, kwargs)))
    values: dict[str, Any] = dict(external_values(basic, model, leaves))
    with straight_to_kernels():
        for index in order if order is not None else range(len(groups)):
            for op in groups[index]:
                run_op(op, values)
    return [values[out.name] if isinstance(out, Ref) else out for out in outputs]


def run_op(op: Op, values: dict[str, Any]) -> None:
    """Run one operation on `values`, and put its results there."""
    args = map_refs(op.args, values.__getitem__)
    result = op.target(*args, **map_refs(dict(op.kwargs), values.__getitem__))
    made = result if op.returns_many else (result,) * len(op.results)
    values.update((name, value) for name, value in zip(op.results, made, strict=True) if name)


def _parts(graph: Graph) -> tuple[BasicGraph, list[tuple[Op, ...]], Sequence[Any]]:
    if isinstance(graph, BasicGraph):
        return graph, [(op,) for op in graph.ops], graph.outputs
    if isinstance(graph, DataFlowGraph):
        return graph.basic, [(node.op,) for node in graph.nodes], graph.basic.outputs
    return graph.dataflow.basic, [node.ops for node in graph.nodes], graph.outputs


def assert_same_as_module(
    graph: Graph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> None:
    """Assert that graph and module return the same bits and leave the same random state.

    The module's buffers and the random stream are as before afterwards.

    Raises:
        AssertionError: an output or the random state differs.
    """
    args, keywords = bind_inputs(sample, kwargs)
    device = check_device(model, (args, keywords), None)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    stream = RngState.save(device)

    def restore() -> None:
        stream.restore()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])

    expected = pytree.tree_leaves(model(*args, **keywords))
    end = RngState.save(device)
    updated = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    restore()
    found = run_graph(graph, model, sample, kwargs=kwargs, order=order)
    try:
        assert len(found) == len(expected), f"{len(found)} outputs, expected {len(expected)}"
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(ours, theirs), f"output {place} differs from the module's"
        assert RngState.save(device).equals(end), "the random state differs from the module's"
        for name, buffer in model.named_buffers():
            assert same_bits(buffer, updated[name]), f"buffer '{name}' differs"
    finally:
        restore()


def same_bits(ours: Any, theirs: Any) -> bool:
    """Return whether two results are equal: type, shape and every element; NaN equals NaN."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return bool(ours == theirs) and isinstance(ours, Tensor) == isinstance(theirs, Tensor)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if torch.equal(ours, theirs):
        return True
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def gradients_of_module(
    model: nn.Module, sample: Any, *, kwargs: Mapping[str, Any] | None = None
) -> list[Tensor | None]:
    """Return autograd's gradients of the sum of all results, for parameters, then for inputs."""
    args, keywords = bind_inputs(sample, kwargs)
    outputs = [t for t in pytree.tree_leaves(model(*args, **keywords)) if isinstance(t, Tensor)]
    outputs = list({id(t): t for t in outputs if t.requires_grad}.values())
    wanted = leaves_that_want(model, (args, keywords))
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
) -> tuple[list[Any], list[Tensor | None]]:
    """Run a step; return the leaves of the result, and the gradients of the sum of all of them.

    The gradients are those of parameters, then of inputs.
    """
    compiled = compile_step(sg, program, plain_callee)
    basic = sg.dataflow.basic
    bound = bind_inputs(sample, kwargs)
    external = external_values(basic, model, tuple(pytree.tree_leaves(bound)))
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
        parts = compiled.backward(saved, tangents)
        for give, gradients in zip(program.gives, parts, strict=True):
            for (leaf, _), gradient in zip(give.gradients, gradients, strict=True):
                key = id(external[leaf])
                found[key] = found[key] + gradient if key in found else gradient
            gradients.clear()
    return results, [found.get(id(t)) for t in leaves_that_want(model, bound)]


def leaves_that_want(model: nn.Module, bound: Any) -> list[Tensor]:
    """Return the parameters, then the inputs, that require a gradient; each once."""
    inputs = [t for t in pytree.tree_leaves(bound) if isinstance(t, Tensor) and t.requires_grad]
    tensors = [*(p for p in model.parameters() if p.requires_grad), *inputs]
    return list({id(t): t for t in tensors}.values())


def assert_same_gradients(
    sg: SimplifiedGraph,
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Assert that the graph's program, as recorded and as it is run, gives autograd's gradients.

    The module's buffers and the random stream are as before afterwards.

    Raises:
        AssertionError: a gradient differs, or only one of the two has it.
    """
    device = check_device(model, bind_inputs(sample, kwargs), None)
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
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    stream = RngState.save(device)

    def restore() -> None:
        stream.restore()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])

    try:
        expected = gradients_of_module(model, sample, kwargs=kwargs)
        restore()
        found = ours()
    finally:
        restore()
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine is None) == (theirs is None), f"gradient {place} exists only on one side"
        assert mine is None or same_bits(mine, theirs), f"gradient {place} differs from autograd's"


class Convolutional(nn.Module):
    """BatchNorm, in-place ReLU, an in-place sum with a later branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.side = nn.Conv2d(3, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.side(x)
        return torch.relu_(y).mean((2, 3))


class Residual(nn.Module):
    """Equal residual layers with dropout and split views."""

    def __init__(self, layers: int = 3, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            a, b, c = up(x).chunk(3, dim=-1)
            x = x + self.dropout(down(torch.tanh(a) * b.sigmoid() + c))
        return x


class Overlapping(nn.Module):
    """A value used by several operations and by views of itself: gradient order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        a, b = z * 1.37, z.sin()
        flat, part = z.view(-1) * 0.77, z[:, :5] * 3.3
        return a.sum() + b.pow(2).sum() + flat.cumsum(0).sum() + part.exp().sum() + (z * z).sum()


class Mixed(nn.Module):
    """A no-grad region, a written slice, padding, a transposed weight, nested outputs."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            offset = (self.mask * 2).cumsum(0)
        y = self.linear(x) + offset
        z = torch.dropout(torch.relu_(self.bn(y)), 0.3, True)
        z = z @ self.matrix.t() @ self.matrix
        out = torch.zeros_like(z)
        out[:, 1:3] = z[:, 1:3]
        p, q = z.chunk(2, 1)
        return {"sum": (out + torch.nn.functional.pad(p * q, (0, 4))).sum(), "rest": (z, None)}


class Recurrent(nn.Module):
    """An LSTM: several results of one operation, and a kernel chosen by the grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(x)
        return out.sum() + hidden.square().sum() + cell.mean()


class Spectral(nn.Module):
    """Complex values between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 9, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight).relu()


class LowPrecision(nn.Module):
    """An autocast region inside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
        return self.second(y.float())


class Turned(nn.Module):
    """A value used as it is and transposed: how its gradient's sum lies in memory matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 37)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.scale.exp() * self.linear(x)
        return logits.softmax(1).square().sum() + logits.T.log_softmax(1).square().sum()


class Averaging(nn.Module):
    """A buffer that the forward reads and writes."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y * self.average


def example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a small module in train mode and the arguments of its sample."""
    torch.manual_seed(0)
    examples: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
        "convolutional": (Convolutional, (torch.randn(2, 3, 8, 8),)),
        "residual": (Residual, (torch.randn(4, 16),)),
        "overlapping": (Overlapping, (torch.randn(4, 8),)),
        "mixed": (Mixed, (torch.randn(4, 8),)),
        "recurrent": (Recurrent, (torch.randn(5, 3, 6),)),
        "spectral": (Spectral, (torch.randn(4, 16),)),
        "low_precision": (LowPrecision, (torch.randn(4, 8),)),
        "averaging": (Averaging, (torch.randn(4, 8),)),
        "turned": (Turned, (torch.randn(29, 8),)),
    }
    build, sample = examples[name]
    return build().train(), sample


EXAMPLES = (
    "convolutional",
    "residual",
    "overlapping",
    "mixed",
    "recurrent",
    "spectral",
    "low_precision",
    "averaging",
    "turned",
)
