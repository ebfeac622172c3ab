"""On a GPU, and where possible under its rules on a CPU: bits, kernels, streams, random numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)
from torch.nn.attention import SDPBackend, sdpa_kernel

from oracles.training import assert_same_gradients, assert_trains_like, eager_copy
from rkgb import UnsupportedDeviceError
from rockmate import InfeasibleBudgetError, Rockmate, SelfTestError
from rockmate.comparison.deterministic import deterministic_algorithms
from zoo.nets import network_on

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
)
NETS = ["gpt", "resnet", "unet", "lstm", "transformer", "mixer", "tied", "fno", "uno"]


def needs_gpu(test: Any) -> Any:
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


def planned(model: nn.Module, sample: Any, budget: float, **options: Any) -> Rockmate:
    try:
        return Rockmate(model, sample, budget, cost="flops", **options)
    except InfeasibleBudgetError as error:
        # What blocks take beyond their tensors depends on the plan.
        return Rockmate(model, sample, int(1.1 * error.minimum_bytes), cost="flops", **options)


def step(module: nn.Module, sample: Any) -> None:
    result = module(*sample)
    (result if result.dim() == 0 else result.float().square().mean()).backward()


@needs_gpu
@pytest.mark.parametrize("name", NETS)
def test_training_is_bit_equal_in_deterministic_mode(name: str, gpu: torch.device) -> None:
    model, sample = network_on(gpu, name)
    eager = eager_copy(model)
    with deterministic_algorithms():
        module = planned(model, sample, 0.6)
        assert_trains_like(module, eager, sample)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_planned_and_close_to_eager(
    dtype: torch.dtype, place: torch.device
) -> None:
    model, (x,) = network_on(place, "tied")
    model.to(dtype)
    sample = (x.to(dtype),)
    eager = eager_copy(model)
    module = planned(model, sample, 0.8, self_test="deterministic")
    with deterministic_algorithms(), torch.random.fork_rng(devices=_devices(place)):
        step(eager, sample)
    with deterministic_algorithms(), torch.random.fork_rng(devices=_devices(place)):
        step(module, sample)
    assert_same_gradients(module, eager)


def _devices(place: torch.device) -> list[torch.device]:
    return [place] if place.type == "cuda" else []


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class SelfAttention(nn.Module):
    """Attention of 64 channels a head, as cuDNN takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 64)).transpose(1, 2) for y in self.qkv(x).split(128, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.tanh(self.out(y.transpose(1, 2).flatten(2)))


@needs_gpu
@pytest.mark.parametrize("where", ["forward", "planning", "both"])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_every_kernel_of_attention_trains_as_eager_does(
    backend: str, where: str, gpu: torch.device
) -> None:
    """Some add gradients with atomics: planning succeeds, and gradients are within rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(*(SelfAttention() for _ in range(3))).to(gpu, torch.bfloat16)
    x = torch.randn(4, 128, 128, device=gpu, dtype=torch.bfloat16)
    eager = eager_copy(model)

    def around(when: str) -> Any:
        inside = where in (when, "both")
        return sdpa_kernel(BACKENDS[backend]) if inside else contextlib.nullcontext()

    with around("planning"):
        module = Rockmate(model, x, 1 << 24, cost="flops")
    for net in (module, eager):
        with around("forward"):
            result = net(x)
        result.float().square().mean().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        difference = (ours.grad.float() - theirs.grad.float()).norm()
        assert difference <= 0.02 * theirs.grad.float().norm()


def test_a_wrong_gradient_is_found(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    import rockmate.networks.self_test as testing

    model, sample = network_on(place, "tied")
    real = testing.run_step

    def wrong(call: Any, twin: nn.Module, given: Any, **options: Any) -> Any:
        result = real(call, twin, given, **options)
        if call is not twin:
            name = next(iter(result.gradients))
            value = result.gradients[name]
            result.gradients[name] = value * 1.01 if isinstance(value, Tensor) else "another"
        return result

    monkeypatch.setattr(testing, "run_step", wrong)
    with pytest.raises(SelfTestError, match="the gradient of"):
        Rockmate(model, sample, 0.9, cost="flops")


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_precision_of_products_is_part_of_a_plan(precision: str, place: torch.device) -> None:
    model, sample = network_on(place, "tied")
    eager = eager_copy(model)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with deterministic_algorithms():
            module = planned(model, sample, 0.7)
            assert_trains_like(module, eager, sample, steps=2)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_scaler_skips_a_step_with_infinite_gradients(place: torch.device) -> None:
    model, sample = network_on(place, "tied")
    kind = place.type
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    with torch.autocast(kind, dtype=dtype):
        module = planned(model, sample, 0.9)
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = [p.detach().clone() for p in module.parameters()]
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=dtype):
            loss = module(*sample).float().square().mean()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        now = list(module.parameters())
        equal = all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
        assert equal != moves


@needs_gpu
def test_side_streams_compute_the_same(gpu: torch.device) -> None:
    model, sample = network_on(gpu, "gpt")
    eager = eager_copy(model)
    with deterministic_algorithms():
        module = planned(model, sample, 0.6)
        stream, copies = torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)
        for _ in range(20):
            for net in (eager, module):
                net.zero_grad()
                with torch.random.fork_rng(devices=[gpu]):
                    with torch.cuda.stream(copies):
                        given = tuple(
                            t.cpu().pin_memory().to(gpu, non_blocking=True) for t in sample
                        )
                    stream.wait_stream(copies)
                    stream.wait_stream(torch.cuda.current_stream(gpu))
                    with torch.cuda.stream(stream):
                        loss = net(*given)
                    torch.cuda.current_stream(gpu).wait_stream(stream)
                    loss.backward()
                    torch.cuda.synchronize(gpu)
            assert_same_gradients(module, eager)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_another_device_than_the_current_one() -> None:
    place = torch.device("cuda", 1)
    model, sample = network_on(place, "gpt")
    eager = eager_copy(model)
    before = torch.cuda.memory_allocated(0)
    with deterministic_algorithms():
        module = Rockmate(model, sample, 0.7)
        assert_trains_like(module, eager, sample)
    assert module.plan.problem.base_time_ms > 0
    assert torch.cuda.memory_allocated(0) == before


class Routed(nn.Module):
    """Sums by atomics on a GPU, and a choice by what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device) % 8
        sums = torch.zeros(8, 32, device=x.device).index_add(0, places, self.first(x))
        chosen = sums.topk(4, dim=1).indices
        return self.last(x) * torch.gather(sums, 1, chosen).sum()


def test_what_adds_by_atomics_is_never_run_again_where_it_differs(place: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Routed() for _ in range(2))).to(place)
    module = planned(model, torch.randn(4096, 32, device=place), 0.9)
    network = module._rockmate.planned.network
    count = len(network.problem.nodes)
    again = {s.node for s in module.plan.steps[count:] if s.kind == "F"}
    assert again.isdisjoint(network.fixed)


@needs_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_is_captured_as_a_graph_or_refused(dropout: float, gpu: torch.device) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout)) for _ in range(6)]
    model = nn.Sequential(*layers).to(gpu)
    x = torch.randn(256, 64, device=gpu)
    eager = eager_copy(model)
    module = planned(model, x, 0.6)
    for net in (module, eager):
        step(net, (x,))
    if not dropout:
        expected = [p.grad.clone() for p in eager.parameters()]
    stream = torch.cuda.Stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        for _ in range(3):
            module.zero_grad(set_to_none=False)
            step(module, (x,))
    torch.cuda.synchronize(gpu)
    graph = torch.cuda.CUDAGraph()
    if dropout and module.plan.overhead > 0:
        with pytest.raises(UnsupportedDeviceError), torch.cuda.graph(graph):
            step(module, (x,))
        return
    module.zero_grad(set_to_none=False)
    with torch.cuda.graph(graph):
        step(module, (x,))
    module.zero_grad(set_to_none=False)
    graph.replay()
    torch.cuda.synchronize(gpu)
    if not dropout:
        for ours, theirs in zip(module.parameters(), expected, strict=True):
            assert torch.allclose(ours.grad, theirs, rtol=1e-5)
