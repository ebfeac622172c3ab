"""`compile=True`: the same bits under every budget, eager's values up to rounding, honest bytes.

Eager PyTorch is the oracle of values, the allocator that of bytes. Compiling is slow, so that the
networks here are few, small, and made of the same pieces.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rkgb.compiled.code.known as knowing
import rkgb.compiled.rewrite as rewriting
import rockmate.networks.keeping as choosing
from rkgb.capture import twin_of
from rkgb.compiled.code.classes import NotCompiledError
from rkgb.compiled.code.known import KnownClasses
from rkgb.costs import Measured
from rkgb.engine import Sample, measure
from rockmate import Rockmate
from rockmate.comparison.eager import StepResult, run_step
from rockmate.comparison.rounding import compare_rounded, nudge
from rockmate.errors import SelfTestError, UnknownChoiceError
from rockmate.networks.network import Network
from rockmate.networks.planned import Planned
from rockmate.networks.self_test import self_test
from rockmate.requests import request
from rockmate.schedules.plan import Plan

Result = list[Tensor]
# By FLOPs no form of a piece is faster than the other: one is compiled.
CHEAP: dict[str, Any] = {"cost": "flops"}


class Block(nn.Module):
    """A residual perceptron, with dropout where asked for."""

    def __init__(self, width: int = 16, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(functional.gelu(self.into(self.norm(x))))
        return x + functional.dropout(h, self.drop, self.training) if self.drop else x + h


class Language(nn.Module):
    """Embedding, blocks with dropout, the embedding again as the head, a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Block(drop=0.1) for _ in range(4))

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            functional.linear(x, self.embed.weight).flatten(0, 1), wanted.flatten()
        )


class Pictures(nn.Module):
    """Convolutions, BatchNorm with its buffers, ReLU in place, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + functional.relu(norm(conv(x)), inplace=True)
        return x.mean((2, 3))


class Two(nn.Module):
    """Two outputs, one of them read on the way to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks[:2]:
            x = block(x)
        y = x
        for block in self.blocks[2:]:
            y = block(y)
        return x, y


class InHalf(nn.Module):
    """Blocks in bfloat16, by an autocast region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.blocks(x)


class Skips(nn.Module):
    """Two resolutions: pooling down, a transposed convolution up, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.merge = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 8, 1)
        self.last = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu(self.first(x))
        down = functional.relu(self.deep(functional.max_pool2d(first, 3, 2, 1)))
        x = self.merge(torch.cat([first, self.up(down)], 1))
        for conv in self.last:
            x = conv(torch.tanh(x))
        return x.mean((2, 3))


class AroundHalf(nn.Module):
    """Calls a module in bfloat16, by an autocast region around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


class Heads(nn.Module):
    """A layer of a language model of today: turned heads of one input, and a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(32, 80, bias=False), nn.Linear(32, 80, bias=False)
        self.down = nn.Linear(80, 32, bias=False)
        angles = torch.arange(12.0)[:, None] / (1 + torch.arange(8.0))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).view(*x.shape[:2], 2, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.turned(q), self.turned(k)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    def turned(self, t: Tensor) -> Tensor:
        return t * self.cos + torch.cat((-t[..., 8:], t[..., :8]), -1) * self.sin


def turned_heads() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(*(Heads() for _ in range(3))), (torch.randn(4, 12, 32),)


def language() -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.arange(16).view(2, 8)
    return Language(), (tokens, (tokens * 5 + 1) % 24)


def pictures() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Pictures(), (torch.randn(2, 3, 8, 8),)


def in_half() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return InHalf(), (torch.randn(4, 8, 16),)


def train(run: nn.Module, model: nn.Module, data: Sequence[Any], steps: int = 3) -> Result:
    """Return losses, gradients, parameters, buffers and the random state of some steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: Result = []
    for _ in range(steps):
        optimizer.zero_grad()
        result = run(*data)
        loss = result if result.dim() == 0 else result.float().square().mean()
        loss.backward()
        found.append(result.detach().clone())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


def same_bits(a: Result, b: Result) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def assert_near(ours: Result, eager: Result, bound: float) -> None:
    assert len(ours) == len(eager)
    assert torch.equal(ours[-1], eager[-1])  # the random state
    for a, b in zip(ours, eager, strict=True):
        assert (a.double() - b.double()).norm() <= bound * (b.double().norm() + 1e-3)


# ---------------------------------------------------------------------- budgets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "bound"),
    [
        pytest.param(language, 1e-5, marks=pytest.mark.nightly, id="dropout-tied"),
        pytest.param(pictures, 1e-4, id="batchnorm-in-place"),
        pytest.param(turned_heads, 1e-5, marks=pytest.mark.nightly, id="gates-and-heads"),
        pytest.param(in_half, 0.03, marks=pytest.mark.nightly, id="autocast"),
    ],
)
def test_bits_do_not_depend_on_the_budget(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], bound: float
) -> None:
    torch.manual_seed(0)
    model, data = make()
    plain = copy.deepcopy(model)
    eager = train(plain, plain, data)
    ours: list[Result] = []
    peaks: list[int] = []
    for share in (1.0, 0.85, 0.7):
        budget = int(share * peaks[0]) if peaks else 1.0
        own = copy.deepcopy(model)
        rk = Rockmate(own, data, budget, compile=True, **CHEAP)
        assert rk.measured_peak_bytes == rk.plan.peak_bytes <= rk.budget_bytes
        assert rk.plan.compiled.compiled >= 6
        assert rk.plan.compiled.compiled_now == 0 or not peaks  # none for another budget
        ours.append(train(rk, own, data))
        peaks.append(rk.plan.peak_bytes)
    assert peaks[0] > peaks[1] > peaks[2]
    assert same_bits(ours[0], ours[1])
    assert same_bits(ours[0], ours[2])
    assert_near(ours[0], eager, bound)


@pytest.mark.nightly
def test_lengths_share_code_from_the_second_on_and_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rewriting, "_known", KnownClasses())
    torch.manual_seed(0)
    model = Language()
    made = {length: torch.randint(24, (2, 4, length)) for length in (12, 9, 7, 5)}
    plain = copy.deepcopy(model)
    eager = {length: train(plain, plain, tuple(data), 1) for length, data in made.items()}
    peak, found = 0, []
    for share in (1.0, 0.75):
        own = copy.deepcopy(model)
        budget = int(share * peak) if peak else 1.0
        rk = Rockmate(own, tuple(made[12]), budget, compile=True, **CHEAP)
        counts, ours = [rewriting._known.compiled], {}
        for length, data in made.items():
            ours[length] = train(rk, own, tuple(data), 1)
            counts.append(rewriting._known.compiled)
        first = counts[0]
        later = 0 if peak else first  # of the second length, for all others; none for a budget
        assert counts == [first, first, *[first + later] * 3]
        assert rk.measured_peak_bytes <= rk.budget_bytes
        assert len(rk.plans) == len(made)
        for length, result in ours.items():
            assert_near(result, eager[length], 1e-4)
        peak = peak or rk.plan.peak_bytes
        found.append(ours)
    assert all(same_bits(found[0][length], found[1][length]) for length in made)


def _faster(*given: Any, **options: Any) -> Measured:
    """Measure, and find every piece faster that keeps more."""
    found = measure(*given, **options)
    costs = {k: replace(c, time_ms=0) if "_keeping" in k else c for k, c in found.costs.items()}
    if len(costs) > 1:  # what a piece frees depends on what others keep: some are met late
        costs.pop(next(k for k in costs if "_keeping" in k))
    return replace(found, costs=costs)


@pytest.mark.nightly
def test_what_pieces_keep_and_what_is_computed_again_are_chosen_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_ms: list[float] = []
    fill = choosing.Keeping.filled

    def filled(keeping: choosing.Keeping, network: Network, plan: Plan) -> tuple[Network, Plan]:
        found = fill(keeping, network, plan)
        assert found[1].peak_bytes <= plan.budget_bytes
        times_ms.append(found[1].time_ms)
        return found

    monkeypatch.setattr(choosing, "measure", _faster)
    monkeypatch.setattr(choosing.Keeping, "filled", filled)
    torch.manual_seed(0)
    model, data = language()
    rk = Rockmate(model, data, 0.5, compile=True)
    assert rk.measured_peak_bytes == rk.plan.peak_bytes <= rk.budget_bytes
    assert len(times_ms) > 1, "a plan in which some keep more from the start"
    first, *others = times_ms
    chosen = rk.plan.plan.time_ms
    assert chosen <= first
    assert chosen <= min(others) / (1 - choosing._LEAST_STEP)


@pytest.mark.nightly
def test_pieces_keep_more_where_there_is_room_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "measure", _faster)
    torch.manual_seed(0)
    model, data = language()
    ours: list[Result] = []
    kept: list[int] = []
    peaks: list[int] = []
    for budget in (1.0, 0.7, 0.5):
        own = copy.deepcopy(model)
        rk = Rockmate(own, data, budget, compile=True)
        assert rk.measured_peak_bytes == rk.plan.peak_bytes <= rk.budget_bytes
        kept.append(rk.plan.compiled.keeping)
        peaks.append(rk.plan.peak_bytes)
        ours.append(train(rk, own, data))
    assert kept[0] > kept[1] >= kept[2]
    assert peaks[0] > peaks[1] > peaks[2]
    own = copy.deepcopy(model)
    rk = Rockmate(own, data, 1.0, compile=True, **CHEAP)
    assert rk.plan.compiled.keeping == 0
    assert rk.plan.compiled.compiled_now == 0  # the first form is the same
    assert rk.plan.peak_bytes < peaks[0]
    ours.append(train(rk, own, data))
    assert all(same_bits(ours[0], other) for other in ours)

    def strict(planned: Planned, *rest: Any) -> Any:
        if planned.network.kept:
            raise SelfTestError("other bits")
        return self_test(planned, *rest)

    monkeypatch.setattr(request, "self_test", strict)
    rk = Rockmate(copy.deepcopy(model), data, 1.0, compile=True)
    assert rk.plan.compiled.keeping == 0
    assert rk.measured_peak_bytes == rk.plan.peak_bytes


@pytest.mark.nightly
def test_every_piece_of_a_network_with_skips_is_compiled() -> None:
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(2, 3, 16, 16)
    plain = copy.deepcopy(model)
    eager = train(plain, plain, (x,))
    ours: list[Result] = []
    peaks: list[int] = []
    for share in (1.0, 0.85):
        own = copy.deepcopy(model)
        rk = Rockmate(own, x, int(share * peaks[0]) if peaks else 1.0, compile=True, **CHEAP)
        assert rk.plan.compiled.compiled == rk.plan.compiled.nodes >= 8
        assert rk.measured_peak_bytes == rk.plan.peak_bytes <= rk.budget_bytes
        ours.append(train(rk, own, (x,)))
        peaks.append(rk.plan.peak_bytes)
    assert peaks[1] < peaks[0]
    assert same_bits(*ours)
    assert_near(ours[0], eager, 1e-4)


@pytest.mark.nightly
def test_autocast_around() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    eager = train(AroundHalf(plain), plain, (x,))
    ours: list[Result] = []
    for budget in (1.0, 0.75):
        own = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rk = Rockmate(own, x, budget, compile=True, **CHEAP)
        ours.append(train(AroundHalf(rk), own, (x,)))
        assert len(rk.plans) == 1
        assert rk.plan.compiled.compiled >= 6
    assert same_bits(*ours)
    assert_near(ours[0], eager, 0.03)


@pytest.mark.slow
def test_equal_layers_are_compiled_once_and_the_report_names_what_is_not() -> None:
    torch.manual_seed(0)
    model, data = language()
    rk = Rockmate(model, data, 0.8, compile=True, **CHEAP)
    report = rk.plan.compiled
    assert report.classes < report.compiled < report.nodes
    assert {name for _, name, _ in report.eager} >= {"embedding", "empty_strided+bernoulli_+div_"}
    text = str(rk.plan)
    assert f"compiled: {report.compiled} of {report.nodes} nodes" in text
    assert "eager: embedding in embed" in text
    assert "is rounding" in text  # what the self-test found
    assert "boxed = [" in rk.plan.source()


# ---------------------------------------------------------------------- gradients


@pytest.mark.nightly
def test_gradients_that_arrive_otherwise_and_accumulate() -> None:
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: (x * y).sum(),
        lambda x, y: y.sum(),  # strides of zero, and none at the first output
        lambda x, y: x.square().mean(),
        lambda x, y: (x * y).sum(),
    ]
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 8, 16)

    def gradients(run: nn.Module, own: nn.Module) -> Result:
        found: Result = []
        for loss in losses:
            own.zero_grad()
            value = loss(*run(x))
            value.backward(retain_graph=True)
            value.backward()  # the second runs the forward again
            loss(*run(x)).backward()  # accumulated
            found += [torch.zeros(()) if p.grad is None else p.grad for p in own.parameters()]
        return found

    eager = gradients(own := copy.deepcopy(model), own)
    ours = []
    for budget in (1.0, 0.7):
        own = copy.deepcopy(model)
        rk = Rockmate(own, x, budget, compile=True, **CHEAP)
        ours.append(gradients(rk, own))
    assert same_bits(*ours)
    for a, b in zip(ours[0], eager, strict=True):
        assert (a - b).norm() <= 1e-5 * (b.norm() + 1e-3)


@pytest.mark.nightly
def test_under_ddp_and_at_another_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    long, short = torch.randn(4, 8, 16), torch.randn(4, 4, 16)
    eager = copy.deepcopy(model)
    for x in (long, short):
        eager(x).square().mean().backward()
    found: list[Result] = []
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        for budget, wrapped in ((1.0, False), (0.7, False), (0.7, True)):
            own = copy.deepcopy(model)
            rk = Rockmate(own, long, budget, compile=True, **CHEAP)
            run = nn.parallel.DistributedDataParallel(rk) if wrapped else rk
            for x in (long, short):
                run(x).square().mean().backward()
            found.append([p.grad for p in own.parameters()])
            assert len(rk.plans) == 2
    finally:
        torch.distributed.destroy_process_group()
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])
    for ours, theirs in zip(found[0], eager.parameters(), strict=True):
        assert (ours - theirs.grad).norm() <= 1e-5 * (theirs.grad.norm() + 1e-3)


# ---------------------------------------------------------------------- what stays eager


def test_a_piece_that_does_not_compile_is_eager_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NotCompiledError("a kernel too many")

    monkeypatch.setattr(knowing, "compile_code", fails)
    monkeypatch.setattr(rewriting, "_known", KnownClasses())
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    x = torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    eager = train(plain, plain, (x,))
    with caplog.at_level(logging.WARNING):
        rk = Rockmate(model, x, 0.7, compile=True)
    assert rk.plan.compiled.compiled == 0
    assert all(why == "a kernel too many" for _, _, why in rk.plan.compiled.eager)
    assert "stays eager: a kernel too many" in caplog.text
    assert same_bits(train(rk, model, (x,)), eager)


@pytest.mark.slow
def test_without_a_compiler_it_is_refused_at_once() -> None:
    code = (
        "import torch, rkgb\n"
        "from rockmate import Rockmate\n"
        "try:\n"
        "    Rockmate(torch.nn.Linear(4, 4), torch.randn(2, 4), 1.0, compile=True)\n"
        "except rkgb.CompilerMissingError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "CXX": "/nowhere/c++"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "install g++" in run.stdout


def test_compile_takes_yes_or_no() -> None:
    with pytest.raises(UnknownChoiceError, match="compile 'max' is unknown"):
        Rockmate(nn.Linear(4, 4), torch.randn(2, 4), 1.0, compile="max")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the self-test


def a_step() -> StepResult:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8, 16)
    return run_step(model, model, Sample.of(model, x))


def test_rounding_passes_and_wrong_values_do_not() -> None:
    eager = a_step()
    key = "parameter 'into.weight'"

    def with_gradient(change: Callable[[Tensor], Tensor]) -> StepResult:
        return replace(eager, gradients={**eager.gradients, key: change(eager.gradients[key])})

    near = compare_rounded(eager, with_gradient(lambda g: g * (1 + 1e-6)), "Net", torch.float32)
    assert f"the gradient of {key}" in near
    for wrong in (
        lambda g: g * 1.001,
        lambda g: g.flip(0),
        lambda g: torch.full_like(g, torch.nan),
        lambda g: g.double(),
    ):
        with pytest.raises(SelfTestError, match=r"into\.weight"):
            compare_rounded(eager, with_gradient(wrong), "Net", torch.float32)


def test_what_roundings_of_the_weights_move_may_be_off_by_as_much() -> None:
    eager = a_step()
    key = "parameter 'into.weight'"

    def off_by(share: float) -> StepResult:
        changed = eager.gradients[key] * (1 + share)
        return replace(eager, gradients={**eager.gradients, key: changed})

    def compare(ours: float, moved: float) -> str:
        return compare_rounded(eager, off_by(ours), "Net", torch.float32, lambda: off_by(moved))

    assert "moved by roundings" in compare(0.02, 0.01)
    assert "moved" not in compare(1e-6, 0.01)
    for ours, moved in ((0.02, 0.001), (0.7, 10.0), (math.nan, 0.1)):
        with pytest.raises(SelfTestError, match=r"into\.weight"):
            compare(ours, moved)


def test_a_nudge_moves_a_twins_weights_and_no_others() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    twin = nudge(twin_of(model).module)
    assert torch.equal(model[0].weight, before)
    assert twin[1].weight is twin[0].weight
    apart = (twin[0].weight.detach() - before).abs() / before.abs()
    assert 0 < apart.max() < 20 * torch.finfo(torch.float32).eps
    assert (apart == 0).any()


def test_a_gradient_that_is_nothing_but_rounding_may_differ() -> None:
    eager = a_step()
    key = "parameter 'out.bias'"
    noise = torch.linspace(-1e-9, 1e-9, 16)
    theirs = replace(eager, gradients={**eager.gradients, key: noise})
    ours = replace(eager, gradients={**eager.gradients, key: -noise})
    assert "out.bias" in compare_rounded(theirs, ours, "Net", torch.float32)


# ---------------------------------------------------------------------- torch.compile


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_around_is_one_opaque_call_and_inside_is_taken_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    plain = copy.deepcopy(model)
    eager = train(plain, plain, (x,))
    with caplog.at_level(logging.INFO):
        rk = Rockmate(torch.compile(model), x, 1.0)
    assert "torch.compile around Sequential is taken off" in caplog.text
    assert type(rk).__name__ == "Sequential"
    assert same_bits(train(torch.compile(rk), model, (x,)), eager)
    assert len(rk.plans) == 1  # torch.compile changes nothing that a plan depends on

    @torch.compile(fullgraph=True)
    def around(value: Tensor) -> Tensor:
        return rk(value)

    with pytest.raises(Exception, match="Leave fullgraph=True out"):
        around(x)
