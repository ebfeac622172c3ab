"""Generated programs are exact in any order of recomputations, and keep nothing too long."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from oracles.check_program import check_program
from oracles.gradients import gradients_of_graph, gradients_of_module, handed_over, run_program
from rkgb.capture.record import make_B
from rkgb.costs.measure import measure
from rkgb.costs.op_costs import op_key
from rkgb.device.chosen import device_of, trace_memory
from rkgb.device.rng import RngState
from rkgb.elements import same_bits as same
from rkgb.elements.op import Op
from rkgb.elements.sample import bind_inputs
from rkgb.elements.target import GradientCut, GradientPart
from rkgb.elements.tensor_info import storage_bytes, storage_id
from rkgb.errors import InvalidGraphError
from rkgb.graphs.basic import external_values
from rkgb.graphs.dataflow import B_to_D
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph
from rkgb.run.graph.views import runnable
from rkgb.run.program.lowering import lower_step
from rkgb.run.program.places import Step
from rkgb.run.program.source import compile_step, plain_callee
from rkgb.run.program.statements import Begin, Call, Copy, Draw, Drop, Give, Statement, StepProgram
from rkgb.torch_api.private.autograd import straight_to_kernels
from zoo.examples import EXAMPLES, example

CPU = torch.device("cpu")
KINDS = ("recorded", "runnable")
# One example has an output that another was computed from.
CASES = [*((name, kind) for name in EXAMPLES for kind in KINDS), ("mixed", "split")]


@functools.cache
def graph_of(name: str, kind: str) -> SimplifiedGraph:
    """Return the graph as it was recorded, or with fewer views as it is run."""
    model, sample = example(name)
    split = functools.partial(replace, outside=tuple(range(4))) if kind == "split" else None
    graph = D_to_S(B_to_D(make_B(model, sample, kind=split)))
    return graph if kind == "recorded" else runnable(graph).graph


def plan(graph: SimplifiedGraph, again: Sequence[tuple[float, float]] = ()) -> list[Step]:
    """Return the steps of a plan; `again` says where in the backward which forwards run again."""
    count = len(graph.nodes)
    steps: list[Step] = [
        ("B", k)
        for k in reversed(range(count))
        if graph.nodes[k].backward or graph.nodes[k].hand_overs
    ]
    for place, node in again:
        steps.insert(int(place * (len(steps) + 1)), ("F", int(node * count)))
    return [*(("F", k) for k in range(count)), *steps]  # type: ignore[list-item]


def everything_again(graph: SimplifiedGraph) -> list[Step]:
    count = len(graph.nodes)
    steps = plan(graph)
    return [*steps[:count], *steps[:count], *steps[:count], *steps[count:]]


fraction = st.floats(0, 1, exclude_max=True)
recomputations = st.lists(st.tuples(fraction, fraction), max_size=24)


def eager_step(
    model: nn.Module, sample: tuple[Any, ...]
) -> tuple[list[Any], list[Tensor | None], RngState]:
    """Run the module itself; return its results, its gradients and the random state after it."""
    start = RngState.save(CPU)
    with torch.no_grad():  # a second run makes the gradients: put back what the first one wrote
        buffers = [buffer.clone() for buffer in model.buffers()]
    results = pytree.tree_leaves(model(*sample))
    start.restore()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    gradients = gradients_of_module(model, sample)
    return results, gradients, RngState.save(CPU)


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert same(mine, other), f"number {place} differs"


class Driven:
    """A compiled step, run by hand."""

    def __init__(
        self,
        graph: SimplifiedGraph,
        program: StepProgram,
        model: nn.Module,
        sample: tuple[Any, ...],
        callee: Callable[[Op], Callable[..., Any]] = plain_callee,
    ) -> None:
        self.basic = graph.basic
        self.compiled = compile_step(graph, program, callee)
        leaves = tuple(pytree.tree_leaves(bind_inputs(sample)))
        self.external = external_values(self.basic, model, leaves)
        self.outputs: list[Tensor] = []
        self.saved: list[Any] = []

    def forward(self) -> None:
        given = [self.external[name] for name in self.compiled.program.externals]
        with straight_to_kernels():
            self.outputs, self.saved = self.compiled.forward(given)
        assert not given

    def backward(self) -> Iterator[tuple[Give, list[Tensor]]]:
        made = dict(zip(self.compiled.program.outputs, self.outputs, strict=True))
        pairs = zip(self.basic.roots, self.basic.tangent_names, strict=True)
        tangents = [torch.ones_like(made[root]) for root, name in pairs if name is not None]
        ones = {root: torch.ones_like(made[root]) for root in self.basic.roots}
        made.clear()
        self.outputs.clear()
        with straight_to_kernels(), torch.no_grad():
            yield from handed_over(self.basic, self.compiled, self.saved, tangents, ones)
        assert not self.saved
        assert not tangents


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_any_order_of_recomputations_gives_what_the_module_gives(name: str, kind: str) -> None:
    """Results, gradients, buffers and the random state, bit for bit, two steps in a row."""
    graph = graph_of(name, kind)

    @settings(max_examples=12)
    @given(again=recomputations)
    def check(again: list[tuple[float, float]]) -> None:
        model, sample = example(name)
        twin = copy.deepcopy(model)
        program = lower_step(graph, plan(graph, again))
        check_program(graph, program)
        for _ in range(2):
            start = RngState.save(CPU)
            results, gradients, end = eager_step(twin, sample)
            start.restore()
            found = run_program(graph, program, model, sample)
            assert RngState.save(CPU).equals(end)
            assert_same(found[0], results)
            assert_same(found[1], gradients)
            assert_same(list(model.buffers()), list(twin.buffers()))

    check()


@pytest.mark.parametrize("name", ["convolutional", "averaging", "mixed"])
def test_buffers_are_written_once_however_often_their_node_runs(name: str) -> None:
    graph = graph_of(name, "runnable")
    model, sample = example(name)
    twin = copy.deepcopy(model)
    start = RngState.save(CPU)
    twin(*sample)
    start.restore()
    gradients_of_graph(graph, model, sample, steps=everything_again(graph))
    assert_same(list(model.buffers()), list(twin.buffers()))
    fresh = example(name)[0].buffers()
    assert not all(same(b, a) for b, a in zip(model.buffers(), fresh, strict=True))


@pytest.mark.parametrize("name", ["residual", "mixed", "recurrent"])
def test_recomputed_random_numbers_are_the_first_ones_and_the_stream_goes_on(name: str) -> None:
    """The backward begins at another random state than the forward has left."""
    graph = graph_of(name, "runnable")
    model, sample = example(name)
    torch.manual_seed(5)
    program = lower_step(graph, everything_again(graph))
    run = Driven(graph, program, model, sample)
    run.forward()
    torch.manual_seed(77)
    torch.rand(3)
    before = RngState.save(CPU)
    given = [(give, list(part)) for give, part in run.backward()]
    assert RngState.save(CPU).equals(before)
    found: dict[str, Tensor] = {}
    for give, part in given:
        for (leaf, _), gradient in zip(give.gradients, part, strict=True):
            found[leaf] = found[leaf] + gradient if leaf in found else gradient
    torch.manual_seed(5)
    expected = gradients_of_module(model, sample)
    names = {target: name for name, target in graph.basic.parameters.items()}
    assert_same([found[names[n]] for n, _ in model.named_parameters()], expected)


def test_forwards_run_in_grad_mode_and_backwards_do_not() -> None:
    """An LSTM on a CPU has other kernels, which keep nothing for a backward, outside grad mode."""
    model, sample = example("recurrent")
    graph = graph_of("recurrent", "runnable")
    modes: dict[str, set[bool]] = {}

    def watched(op: Op) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            modes.setdefault(op.name, set()).add(torch.is_grad_enabled())
            return op.target(*args, **kwargs)

        return call

    run = Driven(graph, lower_step(graph, everything_again(graph)), model, sample, watched)
    run.forward()
    list(run.backward())
    forward = {op.name for op in graph.basic.ops}
    assert any(name.startswith("mkldnn_rnn_layer") for name in modes)
    assert all(found == {name in forward} for name, found in modes.items())


def test_a_program_runs_inside_a_backward_that_is_asked_for_chosen_inputs() -> None:
    """An outer autograd.grad tells autograd which results it needs; ours are none of them."""
    graph = graph_of("residual", "runnable")
    model, sample = example("residual")
    collected: list[Tensor | None] = []

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            collected.extend(gradients_of_graph(graph, model, sample))
            return grad

    torch.manual_seed(3)
    expected = gradients_of_module(model, sample)
    torch.manual_seed(3)
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(Outer.apply(x).sum(), [x])
    assert_same(collected, expected)
    assert all(grad is not None for grad in collected)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_fastest_calls_are_the_same_operations(name: str) -> None:
    """Each reaches the dispatcher as the recorded overload, with the recorded results."""
    graph = graph_of(name, "runnable")
    model, sample = example(name)
    basic = graph.basic
    ops = [op for node in graph.nodes for op in (*node.ops, *node.backward)]
    ops = [op for op in ops if not isinstance(op.target, (GradientCut, GradientPart))]
    leaves = tuple(pytree.tree_leaves(bind_inputs(sample)))
    external = external_values(basic, model, leaves)
    measured = measure(basic, ops, external, times=False).callees
    callees = {op.name: measured[op_key(op, basic.infos)] for op in ops}
    program = lower_step(graph, everything_again(graph))
    start = RngState.save(CPU)
    found = []
    for callee in (plain_callee, lambda op: callees[op.name]):
        start.restore()
        fresh, _ = example(name)
        start.restore()
        run = Driven(graph, program, fresh, sample, callee)
        run.forward()
        outputs = [out.clone() for out in run.outputs]
        gradients = [gradient.clone() for _, part in run.backward() for gradient in part]
        found.append([*outputs, *gradients, *fresh.buffers()])
    assert_same(*found)
    fast = [op for op in ops if callees[op.name] is not plain_callee(op)]
    assert len(fast) > len(ops) / 2


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_between_forward_and_backward_only_what_is_saved_is_alive_and_nothing_after(
    name: str, recompute: bool, kind: str
) -> None:
    graph = graph_of(name, kind)
    model, sample = example(name)
    program = lower_step(graph, everything_again(graph) if recompute else plan(graph))
    driven = Driven(graph, program, model, sample)
    old = {storage_id(t) for t in driven.external.values()}
    expected: list[int] = []

    def run(span: Any) -> None:
        with span("forward"):
            driven.forward()
        state_bytes = device_of(CPU).random_state_bytes
        kept = {id(k): state_bytes for k in driven.saved if isinstance(k, RngState)}
        for tensor in (*driven.outputs, *driven.saved):
            if isinstance(tensor, Tensor) and storage_id(tensor) not in old:
                kept[storage_id(tensor)] = storage_bytes(tensor)
        expected.append(sum(kept.values()))
        tensor = None
        with span("backward"):
            for _, gradients in driven.backward():
                gradients.clear()

    forward, backward = trace_memory(run, CPU).spans
    assert forward.end_bytes == expected[0]
    assert backward.end_bytes == 0


# ---------------------------------------------------------------------- the checker


Mutation = Callable[[SimplifiedGraph, list[Statement], random.Random], list[Statement] | None]


def _uses(statement: Statement) -> set[str]:
    match statement:
        case Call(op):
            return set(op.inputs)
        case Copy(_, source):
            return {source}
        case Draw(name, "put back"):
            return {name}
        case Give(_, gradients, _):
            return {value for _, value in gradients}
    return set()


def drop_earlier(
    _: SimplifiedGraph, lines: list[Statement], source: random.Random
) -> list[Statement] | None:
    """Let a variable go before what reads it last."""
    places = [i for i, s in enumerate(lines) if isinstance(s, Drop)]
    source.shuffle(places)
    for place in places:
        dropped = lines[place]
        assert isinstance(dropped, Drop)
        for name in dropped.names:
            readers = [i for i in range(place) if name in _uses(lines[i])]
            if readers:
                rest = tuple(n for n in dropped.names if n != name)
                kept = [Drop(rest)] if rest else []
                early = [*lines[: readers[-1]], Drop((name,)), *lines[readers[-1] : place]]
                return [*early, *kept, *lines[place + 1 :]]
    return None


def leave_out(kind: type) -> Mutation:
    def mutate(
        _: SimplifiedGraph, lines: list[Statement], source: random.Random
    ) -> list[Statement] | None:
        places = [i for i, s in enumerate(lines) if isinstance(s, kind)]
        if not places:
            return None
        place = source.choice(places)
        return lines[:place] + lines[place + 1 :]

    mutate.__name__ = f"leave_out_a_{kind.__name__}"
    return mutate


def swap_calls(
    _: SimplifiedGraph, lines: list[Statement], source: random.Random
) -> list[Statement] | None:
    """Let an operation run before the one that makes what it reads."""
    makers: dict[str, int] = {}
    pairs = []
    for place, statement in enumerate(lines):
        if isinstance(statement, Call):
            pairs += [(makers[n], place) for n in statement.op.inputs if n in makers]
            makers.update(dict.fromkeys(statement.op.results, place))
    if not pairs:
        return None
    first, second = source.choice(pairs)
    lines = list(lines)
    lines[first], lines[second] = lines[second], lines[first]
    return lines


def keep_longer(
    _: SimplifiedGraph, lines: list[Statement], source: random.Random
) -> list[Statement] | None:
    """Let a variable go one part too late."""
    places = [i for i, s in enumerate(lines) if isinstance(s, Drop)]
    source.shuffle(places)
    for place in places:
        later = next((i for i in range(place, len(lines)) if isinstance(lines[i], Begin)), None)
        if later is not None:
            moved = lines[place]
            return [*lines[:place], *lines[place + 1 : later + 1], moved, *lines[later + 1 :]]
    return None


def write_a_buffer_again(
    graph: SimplifiedGraph, lines: list[Statement], source: random.Random
) -> list[Statement] | None:
    """Let a recomputation run all the operations of its node, updates of buffers included."""
    for place, statement in enumerate(lines):
        if isinstance(statement, Begin) and statement.again:
            node = graph.nodes[statement.node]
            if node.written_buffers:
                ops = {op.name: op for op in node.ops}
                end = next(
                    (i for i in range(place + 1, len(lines)) if isinstance(lines[i], Begin)),
                    len(lines),
                )
                part = [
                    Call(ops[s.op.name]) if isinstance(s, Call) and ops[s.op.name].writes else s
                    for s in lines[place:end]
                ]
                return [*lines[:place], *part, *lines[end:]]
    return None


MUTATIONS: tuple[Mutation, ...] = (
    drop_earlier,
    keep_longer,
    swap_calls,
    write_a_buffer_again,
    *(leave_out(kind) for kind in (Begin, Call, Drop, Copy, Draw, Give)),
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_wrong_program_is_refused_and_the_statement_named(mutate: Mutation) -> None:
    tried = 0
    for number, name in enumerate(EXAMPLES):
        graph = graph_of(name, KINDS[number % 2])
        program = lower_step(graph, everything_again(graph))
        for seed in range(8):
            for half in ("forward", "backward"):
                lines = list(getattr(program, half))
                broken = mutate(graph, lines, random.Random(seed))
                if broken is None or [*broken] == lines:
                    continue
                tried += 1
                wrong = replace(program, **{half: tuple(broken)})
                with pytest.raises(InvalidGraphError, match=r"at (statement \d+|the end) of the"):
                    check_program(graph, wrong)
    assert tried > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_lists_of_what_passes_from_forward_to_backward_are_checked(name: str) -> None:
    graph = graph_of(name, "runnable")
    program = lower_step(graph, plan(graph))
    for wrong in (
        replace(program, saved=program.saved[1:]),
        replace(program, saved=(*program.saved, program.saved[0])),
        replace(program, outputs=program.outputs[1:]),
        replace(program, tangents=()),
        replace(program, externals=program.externals[:-1]),
    ):
        with pytest.raises(InvalidGraphError, match="wrong program at"):
            check_program(graph, wrong)


def test_gradients_of_one_leaf_in_another_order_are_refused() -> None:
    """Autograd adds them in the order in which they come, and sums of three round by it."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x).tanh()).sum()

    graph = D_to_S(B_to_D(make_B(Shared(), torch.randn(2, 4))))
    program = lower_step(graph, plan(graph))
    check_program(graph, program)
    places = [i for i, s in enumerate(program.backward) if isinstance(s, Give)]
    lines = list(program.backward)
    first, second = (lines[i] for i in places)
    assert isinstance(first, Give)
    assert isinstance(second, Give)
    turned = replace(first, gradients=first.gradients[::-1])
    names = {leaf for leaf, _ in first.gradients}
    assert names == {leaf for leaf, _ in second.gradients}
    lines[places[0]] = turned
    check_program(graph, replace(program, backward=tuple(lines)))  # of two leaves: any order
    lines[places[0]] = replace(first, gradients=(first.gradients[0], first.gradients[0]))
    with pytest.raises(InvalidGraphError, match=r"is not the next gradient of 'p_linear_"):
        check_program(graph, replace(program, backward=tuple(lines)))


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), again=recomputations)
def test_what_the_checker_accepts_is_exact(
    name: str, seed: int, again: list[tuple[float, float]]
) -> None:
    """Statements of one part change places at random: refused, or the same bits."""
    graph = graph_of(name, "recorded")
    program = lower_step(graph, plan(graph, again))
    shuffled = _with_swaps(program, random.Random(seed))
    try:
        check_program(graph, shuffled)
    except InvalidGraphError:
        return
    model, sample = example(name)
    twin = copy.deepcopy(model)
    start = RngState.save(CPU)
    results, gradients, end = eager_step(twin, sample)
    start.restore()
    found = run_program(graph, shuffled, model, sample)
    assert RngState.save(CPU).equals(end)
    assert_same(found[0], results)
    assert_same(found[1], gradients)
    assert_same(list(model.buffers()), list(twin.buffers()))


def _with_swaps(program: StepProgram, source: random.Random) -> StepProgram:
    halves = []
    for statements in (program.forward, program.backward):
        lines = list(statements)
        for _ in range(3):
            place = source.randrange(max(1, len(lines) - 1))
            pair = lines[place : place + 2]
            if not any(isinstance(s, (Begin, Give)) for s in pair):
                lines[place : place + 2] = pair[::-1]
        halves.append(tuple(lines))
    return replace(program, forward=halves[0], backward=halves[1])
