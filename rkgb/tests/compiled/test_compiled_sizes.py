"""Code of compiled pieces for many sizes: what follows from a size, and what the code gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import rkgb.compiled.code.known as knowing
from rkgb.capture import make_B
from rkgb.compiled.code.classes import CompiledClass, NotCompiledError
from rkgb.compiled.code.compiling import compile_code
from rkgb.compiled.code.known import KnownClasses
from rkgb.compiled.code.sizes import SizeRule, Term
from rkgb.compiled.pieces.grouping import refusal, runs_of
from rkgb.compiled.pieces.joint import Joint, joint_of
from rkgb.engine import B_to_D, D_to_S
from rkgb.graphs import PLANNED_PASSES
from rkgb.graphs.simplified import merging
from rkgb.run.stand_ins import Drawn, StandIns

CPU = torch.device("cpu")

small = st.integers(0, 9)
terms = st.one_of(
    st.builds(lambda n: Term(constant=n), st.integers(-1, 4096)),
    st.builds(lambda n: Term(factor=n), st.integers(1, 64)),
    st.builds(lambda n, m: Term(factor=n, constant=m), st.integers(1, 9), st.integers(-1, 3)),
)
sizes = st.integers(5, 999)


# ---------------------------------------------------------------------- rules


@given(st.lists(terms, max_size=12), sizes, sizes, sizes)
def test_a_rule_that_fits_two_sizes_fits_a_third(
    more: list[Term], one: int, two: int, three: int
) -> None:
    if one == two:
        return
    wanted = [Term(factor=1), *more]
    rule = SizeRule.fitted(*([term.at(size) for term in wanted] for size in (one, two)))
    assert rule is not None
    third = [term.at(three) for term in wanted]
    size = rule.size_of(third)
    # What differs by a constant only may itself be taken as the size.
    assert size is not None
    assert rule.numbers(size) == third


@given(st.lists(terms, max_size=12), sizes, sizes, sizes, st.data())
def test_a_rule_is_not_for_numbers_that_disagree(
    more: list[Term], one: int, two: int, three: int, data: st.DataObject
) -> None:
    if one == two:
        return
    wanted = [Term(factor=1), Term(factor=1), *more]
    rule = SizeRule.fitted(*([term.at(size) for term in wanted] for size in (one, two)))
    assert rule is not None
    third = [term.at(three) for term in wanted]
    place = data.draw(st.integers(0, len(third) - 1))
    third[place] += data.draw(st.sampled_from([-1, 1, 64]))
    assert rule.size_of(third) is None


def test_squares_follow_and_two_sizes_do_not() -> None:
    rule = SizeRule.fitted((8, 5, 3 * 25), (8, 7, 3 * 49))
    assert rule is not None
    assert rule.numbers(11) == [8, 11, 3 * 121]
    assert SizeRule.fitted((8, 5, 40), (6, 7, 42)) is None  # a batch and a length
    assert SizeRule.fitted((1, 1), (4, 4)) is None  # torch treats a size of 1 as none
    assert SizeRule.fitted((3, 4), (3, 4)) is None


# ---------------------------------------------------------------------- pieces


class Layer(nn.Module):
    """A norm, heads that attend to each other, a gate: sizes in arguments too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, 2)
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in parts)
        scores = torch.softmax(q @ k.transpose(2, 3), 3)
        mixed = (scores @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.out(functional.gelu(mixed, approximate="tanh"))


def joints(model: nn.Module, *shape: int) -> list[Joint]:
    """The pieces of a model for an input of a shape."""
    dataflow = B_to_D(make_B(model, torch.randn(shape)))
    plain = D_to_S(dataflow, passes=PLANNED_PASSES)
    but = [i for i, node in enumerate(plain.nodes) if refusal(node, plain)]
    sg = D_to_S(dataflow, passes=(*PLANNED_PASSES, merging(plain, runs_of(plain, but))))
    found = (joint_of(sg, i) for i in range(len(sg.nodes)))
    return [joint for joint in found if joint.results and joint.gradients]


def values(code: CompiledClass, joint: Joint) -> list[Tensor]:
    """Results and gradients on the same numbers for every code."""
    torch.manual_seed(0)
    stand_ins = StandIns(joint.infos, CPU, {}, drawn=Drawn())
    primals, tangents = (
        [stand_ins[name] for name in names] for names in (joint.primals, joint.tangents)
    )
    with torch.no_grad():
        made = list(code.forward(*(primals[place] for place in code.takes)))
        known = {"primal": primals, "tangent": tangents, "result": made}
        gradients = code.backward(*(known[kind][at] for kind, at in code.takes_back))
    return [*made[: len(joint.results)], *gradients]


def near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        bool((a - b).abs().max() <= 1e-5 * (b.abs().max() + 1e-6))
        for a, b in zip(ours, theirs, strict=True)
    )


def test_numbers_and_form_make_up_a_piece() -> None:
    model = nn.Sequential(Layer(), Layer())
    for one, other in zip(joints(model, 3, 6, 16), joints(model, 3, 8, 16), strict=True):
        assert one.form == other.form
        assert one.numbers != other.numbers
        assert one.with_numbers(one.numbers).numbers == one.numbers
        moved = one.with_numbers(other.numbers)
        assert (moved.form, moved.numbers) == (other.form, other.numbers)
        given = [torch.randn(moved.infos[name].shape) for name in moved.primals]
        tangents = [torch.randn(moved.infos[name].shape) for name in moved.tangents]
        pairs = zip(moved.run(given, tangents), other.run(given, tangents), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    wide = joints(nn.Sequential(Layer(32), Layer(32)), 3, 6, 32)
    assert wide[0].form == joints(model, 3, 6, 16)[0].form
    floats = replace(one, forward=tuple(replace(op, kwargs={"eps": 0.5}) for op in one.forward))
    assert floats.form != one.form


@pytest.mark.nightly
def test_the_second_size_makes_code_for_all() -> None:
    model, known = nn.Sequential(Layer(), Layer()), KnownClasses()
    counts = []
    for batch, length in ((3, 6), (3, 8), (3, 11), (3, 64), (3, 6), (5, 7)):
        for joint in joints(model, batch, length, 16):
            code = known.get(joint, CPU)
            assert isinstance(code, CompiledClass)
            if length in (11, 7):
                assert near(
                    values(code, joint),
                    values(compile_code(joint, CPU).class_of(joint, CPU, None), joint),
                )
            if batch == 3:
                assert ("any_size" in repr(code.forward)) == (length > 6)
        counts.append(known.compiled)
    kinds = counts[0]
    assert kinds > 2
    assert counts[:-1] == [kinds] + [2 * kinds] * 4
    # Where rows are counted only, batch and length are one size.
    assert 2 * kinds < counts[-1] <= 3 * kinds


@pytest.mark.nightly
def test_code_is_not_for_sizes_beyond_what_it_took_for_granted() -> None:
    class Clipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * x).cumsum(0)[:12]

    known = KnownClasses()
    shapes: list[tuple[int, ...]] = [(20, 8), (30, 8), (40, 8), (6, 8), (1, 8)]
    for shape in shapes:
        for joint in joints(nn.Sequential(nn.Linear(8, 8), Clipped(), nn.Linear(8, 8)), *shape):
            code = known.get(joint, CPU)
            assert isinstance(code, CompiledClass)
            assert near(
                values(code, joint),
                values(compile_code(joint, CPU).class_of(joint, CPU, None), joint),
            )


def test_what_fails_for_all_sizes_is_compiled_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    as_ever: Callable[..., object] = knowing.compile_code

    def without_rules(joint: Joint, device: object, other: object, rule: object) -> object:
        tried.append(rule is not None)
        if rule is not None:
            raise NotCompiledError("not here")
        return as_ever(joint, device, other, rule)

    monkeypatch.setattr(knowing, "compile_code", without_rules)
    known, told = KnownClasses(), []
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    for rows in (3, 5, 7, 9):
        joint, *_ = joints(model, rows, 8)
        code = known.get(joint, CPU, note=lambda: told.append(True))
        assert isinstance(code, CompiledClass)
        assert "any_size" not in repr(code.forward)
    assert tried == [False, True, False, True, False, False]  # two tries
    assert (len(told), known.compiled) == (6, 4)
