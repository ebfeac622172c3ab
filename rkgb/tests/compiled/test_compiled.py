"""Pieces of a recorded graph: which nodes become one, which pieces are equal, what they return."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import rkgb.compiled.code.known as knowing
import rkgb.compiled.rewrite as rewriting
from rkgb.capture import make_B
from rkgb.compiled.code.classes import CompiledCall, NotCompiledError, check_form
from rkgb.compiled.code.compiling import compile_code
from rkgb.compiled.code.known import KnownClasses
from rkgb.compiled.pieces.grouping import refusal, runs_of
from rkgb.compiled.pieces.joint import Joint, joint_of
from rkgb.compiled.rewrite import check_bits
from rkgb.costs.op_costs import count_flops
from rkgb.engine import B_to_D, D_to_S
from rkgb.graphs import PLANNED_PASSES, SimplifiedGraph
from rkgb.graphs.simplified import merging

CPU = torch.device("cpu")


class Layer(nn.Module):
    """A norm, a perceptron, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.into(self.norm(x))))


def grouped(model: nn.Module, x: Tensor) -> SimplifiedGraph:
    dataflow = B_to_D(make_B(model, x))
    plain = D_to_S(dataflow, passes=PLANNED_PASSES)
    but = [i for i, node in enumerate(plain.nodes) if refusal(node, plain)]
    return D_to_S(dataflow, passes=(*PLANNED_PASSES, merging(plain, runs_of(plain, but))))


def a_joint() -> Joint:
    sg = grouped(nn.Sequential(*(Layer() for _ in range(3))), torch.randn(4, 8))
    return joint_of(sg, 2)


def test_pieces_end_behind_a_product_and_what_is_added_to_it() -> None:
    sg = grouped(nn.Sequential(Layer(), Layer()), torch.randn(4, 8))
    names = [[op.target_name for op in node.ops] for node in sg.nodes]
    one = [["native_layer_norm", "t", "addmm"], ["tanh", "t", "addmm", "add"]]
    assert names == one * 2


def test_equal_layers_are_equal_pieces() -> None:
    sg = grouped(nn.Sequential(*(Layer() for _ in range(4))), torch.randn(4, 8))
    keys = [joint_of(sg, index).key for index in range(len(sg.nodes))]
    assert keys[2] == keys[4] == keys[6]
    assert keys[1] == keys[3] == keys[5]
    assert keys[2] != keys[1]


class Mixed(nn.Module):
    """What may not be compiled: an embedding, dropout's mask, a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.dropout(self.head(self.embed(tokens)), 0.5)
        index = torch.zeros(4, 8, dtype=torch.int64)
        return torch.zeros(4, 8).scatter_add(0, index, x)


def test_random_numbers_and_sums_in_any_order_stay_eager() -> None:
    sg = grouped(Mixed(), torch.arange(4))
    why = {node.main.target_name: refusal(node, sg) for node in sg.nodes}
    assert why["embedding"].startswith("embedding is not among those")
    assert all(refusal(node, sg) for node in sg.nodes if node.is_random)
    assert any(node.is_random for node in sg.nodes)
    assert any(text.startswith("scatter_add is not among those") for text in why.values())
    assert not why["addmm"]


class Counting(nn.Module):
    """A buffer that every step updates first, and reads then."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        self.steps.add_(1)
        return self.out(torch.tanh(h * self.steps))


def test_what_reads_a_buffer_that_it_updates_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowing, "compile_code", _refused)
    compiled = rewriting.compile_pieces(B_to_D(make_B(Counting(), torch.randn(4, 8))))
    assert "reads a buffer that it updates" in {piece.why for piece in compiled.eager}


def test_each_class_is_told_once_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowing, "compile_code", _refused)
    monkeypatch.setattr(rewriting, "_known", KnownClasses())
    told: list[tuple[str, float]] = []
    model = nn.Sequential(*(Layer() for _ in range(4)))
    rewriting.compile_pieces(
        B_to_D(make_B(model, torch.randn(4, 8))), lambda *what: told.append(what)
    )
    # Eight pieces of three kinds: the first takes an input that no gradient reaches.
    assert [text for text, _ in told] == [
        *("compiling native_layer_norm", "compiling tanh", "compiling native_layer_norm")
    ]
    assert [fraction for _, fraction in told] == [0, 1 / 8, 2 / 8]


def _refused(*_: object, **__: object) -> None:
    raise NotCompiledError("not here")


def test_the_joint_computes_what_was_recorded() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    sg = grouped(layer, x)
    joint = joint_of(sg, 0)  # the norm and the first product
    names = dict(sg.basic.parameters)
    values = {name: layer.get_parameter(target).detach() for name, target in names.items()}
    values["args_0"] = x.detach()
    grad = torch.randn(4, 8)
    given = [values[name] for name in joint.primals]
    # What arrives are the gradients of the first product and, past this piece, of the residual.
    tangents = [grad if i == 0 else torch.zeros(4, 8) for i in range(len(joint.tangents))]
    made = joint.run(given, tangents)
    result = layer.into(layer.norm(x))
    result.backward(grad)
    assert torch.equal(made[0], result.detach())
    found = dict(zip(joint.gradients, made[len(joint.results) :], strict=True))
    weights = [h.value for h in sg.nodes[0].hand_overs if h.leaf == "p_into_weight"]
    assert torch.equal(found[weights[0]], layer.into.weight.grad)


@pytest.mark.nightly
def test_a_compiled_class_saves_its_inputs_themselves_and_asserts_sizes() -> None:
    joint = a_joint()
    code = compile_code(joint, CPU).class_of(joint, CPU, None)
    recorded = [*joint.forward, *joint.backward]
    flops = sum(count_flops(op, joint.infos) for op in recorded)
    assert code.forward.flops_of_one + code.backward.flops_of_one == flops  # nothing heavy twice
    assert not any(made.home[0] == "primal" for made in code.results)  # no views of weights
    primals = [torch.randn(joint.infos[name].shape) for name in joint.primals]
    tangents = [torch.randn(joint.infos[name].shape) for name in joint.tangents]
    with torch.no_grad():
        results = list(code.forward(*(primals[place] for place in code.takes)))
        known = {"primal": primals, "tangent": tangents, "result": results}
        args = [known[kind][at] for kind, at in code.takes_back]
        gradients = list(code.backward(*args))
        expected = joint.run(primals, tangents)
        for ours, theirs in zip(
            [*results[: len(joint.results)], *gradients], expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
        wrong = [t.t().contiguous().t() if t.dim() == 2 and t.shape[0] > 1 else t for t in args]
        with pytest.raises(AssertionError, match="stride"):
            code.backward(*wrong)


def test_a_second_start_takes_code_from_inductors_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = random.random()  # nothing that an earlier run has left in the cache

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * x + shift)

    generated = []

    def generate(*args: Any, **options: Any) -> Any:
        generated.append(args)
        return as_ever(*args, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import compile_fx
    as_ever = compile_fx.fx_codegen_and_compile
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", generate)
    joint = joint_of(grouped(Shifted(), torch.randn(4, 8, requires_grad=True)), 0)
    for _ in range(2):
        compile_code(joint, CPU).class_of(joint, CPU, None)
        assert len(generated) == 2  # both halves


@pytest.mark.slow
def test_the_other_form_keeps_more_and_has_the_same_bits() -> None:
    joint = a_joint()  # a norm, a product
    code = compile_code(joint, CPU).class_of(joint, CPU, None)
    other = compile_code(joint, CPU, code).class_of(joint, CPU, None)
    check_bits(joint, CPU, other, code)
    count = len(joint.results)
    kept_bytes = [sum(m.info.storage_bytes for m in c.results[count:]) for c in (code, other)]
    assert kept_bytes[0] < kept_bytes[1]
    assert (code.keeps_more, other.keeps_more) == (False, True)
    assert repr(code.forward) != repr(other.forward)
    assert code.forward.flops_of_one == other.forward.flops_of_one
    with pytest.raises(NotCompiledError, match="keeps no more"):
        compile_code(joint, CPU, other).class_of(joint, CPU, None)

    def off(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.nextafter(t, torch.tensor(9.0)) for t in other.backward.run(tensors)]

    rounded = replace(other, backward=CompiledCall(off, "off", "off", "backward", 0))
    with pytest.raises(NotCompiledError, match="other bits"):
        check_bits(joint, CPU, rounded, code)


@pytest.mark.slow
def test_results_that_share_memory_unlike_the_recording_are_refused() -> None:
    joint = a_joint()
    code = compile_code(joint, CPU).class_of(joint, CPU, None)
    shared = [*code.results[: len(joint.results)]]
    shared[0] = replace(shared[0], home=("primal", 0))
    with pytest.raises(NotCompiledError, match="shares memory"):
        check_form(joint, joint.results, shared)
    info = replace(shared[0].info, stride=shared[0].info.stride[::-1])
    turned = [replace(shared[0], info=info, home=("result", 0))]
    with pytest.raises(NotCompiledError, match="lies in memory as"):
        check_form(joint, joint.results, turned)


class Gated(nn.Module):
    """A gated perceptron behind a norm, as language models have it, and heads of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.register_buffer("cos", torch.arange(8.0).cos())
        self.register_buffer("sin", torch.arange(8.0).sin())

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.turned(self.q(h)), self.turned(self.k(h)), self.v(h)
        heads = (t.view(len(x), 4, 2).transpose(0, 1)[None] for t in (q, k, v))
        attended = functional.scaled_dot_product_attention(*heads)[0]
        x = x + attended.transpose(0, 1).reshape(len(x), 8)
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    def turned(self, t: Tensor) -> Tensor:
        half = torch.cat((-t[..., 4:], t[..., :4]), -1)
        return t * self.cos + half * self.sin


def products(sg: SimplifiedGraph) -> list[list[str]]:
    """What each node has besides views."""
    kept = ("mm", "silu", "mul", "cat", "add", "_scaled_dot_product_flash_attention_for_cpu")
    return [[op.target_name for op in node.ops if op.target_name in kept] for node in sg.nodes]


def test_products_of_one_input_are_one_piece_and_gates_are_rebuilt() -> None:
    sg = grouped(Gated(), torch.randn(5, 8, requires_grad=True))
    heads, attention, gates, out = products(sg)
    assert heads.count("mm") == 3
    assert "cat" not in heads, "rotated behind it, by what reads them"
    assert attention.count("cat") == 2
    assert "mm" not in attention
    assert gates.count("mm") == 2
    assert "silu" not in gates
    assert out == ["silu", "mul", "mm", "add"]


def test_what_leads_to_a_later_product_waits_in_no_circle() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            a, b, c, d = self.layers
            early = torch.tanh(a(x))  # waits for `c`, behind `b`
            between = b(x.sin())
            late = c(early * between) + early
            return d(torch.tanh(late) * between) + torch.sigmoid(early)

    sg = grouped(Crossed(), torch.randn(5, 8))
    for index, node in enumerate(sg.nodes):
        assert all(dep < index for dep in node.deps)
    names = [[op.target_name for op in node.ops if op.target_name != "t"] for node in sg.nodes]
    assert ["mm"] in names
    assert any("tanh" in ops and "mul" in ops and ops.count("mm") == 1 for ops in names)


class Anything(nn.Module):
    """Sums, products of matrices and of activations, roots and sines of anything made before."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = [x @ self.weights[0]]
        for kind, first, second in self.steps:
            a, b = made[first % len(made)], made[second % len(made)]
            weight = self.weights[second % 4]
            made.append((a @ weight, a * b, a + b, a.sin(), torch.tanh(a) * 2.0)[kind])
        return torch.stack(made).sum(0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)), max_size=14))
def test_pieces_of_any_graph_are_in_no_circle(steps: list[tuple[int, int, int]]) -> None:
    sg = grouped(Anything(steps), torch.randn(3, 4))
    plain = D_to_S(sg.dataflow, passes=PLANNED_PASSES)
    but = [i for i, node in enumerate(plain.nodes) if refusal(node, plain)]
    runs = runs_of(plain, but)
    assert len({index for run in runs for index in run}) == sum(map(len, runs))
    merged = len(plain.nodes) - sum(len(run) - 1 for run in runs)
    assert len(sg.nodes) == merged, "a circle would have joined more"
