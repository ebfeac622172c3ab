"""Planned modules under the rules of CUDA, brought to a CPU: blocks, workspaces, threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fake_cuda.allocator import AllocatorRules
from fake_cuda.device import FakeCuda, fake_cuda
from oracles.training import assert_trains_like, eager_copy
from rkgb.engine import Sample
from rockmate import InfeasibleBudgetError, Rockmate
from rockmate.networks import Planned
from rockmate.networks.self_test import eager_step, self_test
from rockmate.schedules.simulate import simulate
from runs.kernels import without_onednn
from runs.processes import run_alone
from zoo.nets import network

NETS = ["gpt", "resnet", "unet", "lstm", "tied", "transformer", "mixer", "uno"]
FRACTIONS = [1.0, 0.85, 0.7, 0.6, 0.5]
# Tensors of the small networks are then as large, beside blocks, as ones of some MiB.
SHRUNK = AllocatorRules.shrunk(64)


def wrapped(model: nn.Module, sample: Any, budget: float | int, **options: Any) -> Rockmate:
    return Rockmate(model, sample, budget, cost="flops", **options)


def plan_of(module: Rockmate) -> Planned:
    plan: Planned = module._rockmate.planned
    return plan


def feasible(model: nn.Module, sample: Any, fraction: float, **options: Any) -> Rockmate:
    """Wrap at a fraction of eager's peak, or at the least that can be had."""
    try:
        return wrapped(model, sample, fraction, **options)
    except InfeasibleBudgetError as error:
        # What the allocator adds depends on the plan, which another budget changes.
        return wrapped(model, sample, int(error.minimum_bytes * 1.1), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        pytest.param(name, fraction, marks=[pytest.mark.nightly] if (i + j) % 5 else [])
        for i, name in enumerate(NETS)
        for j, fraction in enumerate(FRACTIONS)
    ],
)
def test_requests_are_as_predicted_and_blocks_within_the_budget(name: str, fraction: float) -> None:
    model, sample = network(name)
    for expandable in (False, True):
        rules = AllocatorRules.shrunk(64, expandable=expandable)
        with fake_cuda(rules):
            module = feasible(model, sample, fraction)
            plan = plan_of(module)
            predicted = simulate(plan.network.asked, plan.plan.steps).peak_bytes
            given = Sample.of(model, sample)
            for _ in range(3):
                ours, _ = self_test(plan, model, given, None)
                assert ours.peak_bytes == predicted
                assert ours.allocated_peak_bytes <= plan.budget_bytes
            assert module.measured_peak_bytes is not None
            assert module.measured_peak_bytes <= module.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "uno" else pytest.param(n, marks=pytest.mark.nightly) for n in NETS]
)
def test_training_is_bit_equal_with_backwards_in_another_thread(name: str) -> None:
    model, sample = network(name)
    with fake_cuda(SHRUNK):
        eager = eager_copy(model)
        module = feasible(model, sample, 0.6)
        assert_trains_like(module, eager, sample)


def test_a_workspace_that_stays_is_counted_nowhere() -> None:
    model, sample = network("gpt")
    smallest = []
    for workspace_bytes in (0, 32 << 20):
        with fake_cuda(workspace_bytes=workspace_bytes) as device:
            with pytest.raises(InfeasibleBudgetError) as refused:
                wrapped(model, sample, 1000, self_test=False)
            smallest.append(refused.value.minimum_bytes)
            assert device.warm_threads == {"main", "autograd"}
    assert smallest[0] == smallest[1]


class _Greedy(FakeCuda):
    """An allocator that hands out a little more than was predicted, for a while."""

    def trace_memory(self, run: Any) -> Any:
        from dataclasses import replace

        trace = super().trace_memory(run)
        return replace(trace, allocated_peak_bytes=trace.allocated_peak_bytes + 100_000)


@pytest.mark.slow
def test_what_blocks_take_beyond_the_plan_is_set_aside_and_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sample = network("gpt")
    monkeypatch.setattr("fake_cuda.device.FakeCuda", _Greedy)
    with fake_cuda() as device:
        module = wrapped(model, sample, 0.6)
        plan = plan_of(module)
        assert plan.blocks_bytes > 0
        assert plan.plan.peak_bytes <= module.budget_bytes - plan.blocks_bytes
        assert module.measured_peak_bytes is not None
        assert module.measured_peak_bytes <= module.budget_bytes
        assert device.given_back > 0
        # Every byte of the budget is in use already: the rest that remains is too little.
        with pytest.raises(InfeasibleBudgetError) as refused:
            wrapped(model, sample, 1000, self_test=False)
        with pytest.raises(InfeasibleBudgetError, match="blocks of the allocator"):
            wrapped(model, sample, refused.value.minimum_bytes)


def test_the_smallest_budget_that_is_named_holds_in_whole_blocks() -> None:
    model, sample = network("lstm")
    with fake_cuda(AllocatorRules.shrunk(16)):
        with pytest.raises(InfeasibleBudgetError, match="in whole blocks") as refused:
            wrapped(model, sample, 1000)
        smallest = refused.value.minimum_bytes
        module = wrapped(model, sample, smallest)
        assert module.measured_peak_bytes == smallest
        with pytest.raises(InfeasibleBudgetError) as again:
            wrapped(model, sample, smallest - 1)
        assert again.value.minimum_bytes == smallest


def test_a_fraction_is_of_the_blocks_of_a_plain_step() -> None:
    """Tensors of a few bytes lie in blocks of 512: the whole of a plain step is enough."""
    model, sample = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(2, 2)
    with fake_cuda(workspace_bytes=0):
        module = wrapped(model, sample, 1.0)
        assert module.eager_peak_bytes == module.budget_bytes
        assert module.budget_bytes % 512 == 0
        assert module.measured_peak_bytes is not None
        assert module.measured_peak_bytes <= module.budget_bytes


def test_a_plan_for_another_size_is_tried_in_whole_blocks() -> None:
    model, sample = network("gpt")
    longer, shorter = ([t[:, :length] for t in sample] for length in (24, 17))
    with fake_cuda(SHRUNK, own_thread=False):
        module = wrapped(model, longer, 0.6)
        module(*shorter).backward()
        assert [plan.how for plan in module.plans] == ["planned", "resized"]
        *_, plan = module._rockmate.plans
        assert plan.measured_peak_bytes is not None
        assert plan.measured_peak_bytes <= module.budget_bytes


def test_an_eager_step_that_will_not_fit_is_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    model, sample = network("gpt")
    with fake_cuda(memory_bytes=1 << 20) as device:
        module = wrapped(model, sample, 1 << 21)
        assert module.eager_peak_bytes is None
        assert "does not fit" in caplog.text
        assert device.given_back > 0


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), RuntimeError("can't allocate memory: 8 bytes")]
)
def test_an_eager_step_that_runs_out_of_memory_is_left_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise error

    model, sample = network("gpt")
    monkeypatch.setattr("rockmate.networks.self_test.run_step", too_large)
    assert eager_step(model, Sample.of(model, sample), None, "values") is None
    assert "does not fit" in caplog.text


def test_another_device_is_refused_by_name() -> None:
    from rkgb import UnsupportedDeviceError

    with pytest.raises(UnsupportedDeviceError, match="'meta'"):
        Rockmate(nn.Linear(2, 2, device="meta"), torch.ones(3, 2, device="meta"), 1.0)


# ------------------------------------------------------------------------- bits as eager has them


_NOISY = """
import sys, warnings
import torch
from torch import nn
from fake_cuda.device import fake_cuda
from rockmate import Rockmate, SelfTestError

torch.set_num_threads(1)
noise = torch.Generator()
share, planted, kind = float(sys.argv[1]), sys.argv[2] == "planted", sys.argv[3]
calls = [0]


def last_bits(result):
    flips = torch.rand(result.shape, generator=noise) < 0.01
    return torch.where(flips, result * (1 + share), result)


def backward(grad, x, threshold):
    if kind in ("atomics", "rarely") and torch.are_deterministic_algorithms_enabled():
        return torch.where(x > threshold, grad, torch.zeros((), dtype=grad.dtype))
    result = torch.where(x > threshold, grad, torch.zeros((), dtype=grad.dtype))
    calls[0] += 1
    return result if kind == "rarely" and calls[0] % 23 else last_bits(result)


def forward(x):
    found = torch.where(x > 0, x, -x)
    if kind == "forward":
        return last_bits(found)
    # As cuDNN where it searches: what a backward computes again is by another algorithm.
    searches = torch.backends.cudnn.benchmark and torch._C._current_autograd_node() is not None
    return found * (1 + share) if searches else found


library = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if kind in ("backward", "atomics", "rarely"):
        library.impl("threshold_backward", backward, "CPU")
    else:
        library.impl("abs", forward, "CPU")


class Abs(nn.Module):
    def forward(self, x):
        return torch.abs(x) * 0.9


torch.backends.cudnn.benchmark = kind == "searched"
layer = Abs if kind in ("forward", "searched") else nn.ReLU
net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), layer()) for _ in range(5)))
if planted:
    import rockmate.networks.self_test as pipeline
    real = pipeline.run_step

    # Among noisy gradients 2e-7 of one are within what eager itself differs by.
    factor = 1.01 if kind in ("backward", "searched") else 1 + 2e-7

    def wrong(call, twin, sample, **options):
        if call is not twin:
            next(twin.parameters()).register_hook(lambda grad: grad * factor)
        return real(call, twin, sample, **options)

    pipeline.run_step = wrong
with fake_cuda(workspace_bytes=0):
    try:
        test = "deterministic" if "deterministic" in sys.argv else True
        rk = Rockmate(net, torch.randn(16, 32), 0.85, cost="flops", self_test=test)
    except SelfTestError as error:
        print("refused", error)
    else:
        count = len(rk.plan.problem.nodes)
        again = {s.node for s in rk.plan.steps[count:] if s.kind == "F"}
        ops = {rk.plan.problem.nodes[k].op for k in again}
        print("planned", sorted(ops))
"""


def in_a_noisy_process(share: float, planted: str, kind: str, *more: str) -> tuple[str, str]:
    """Plan where one kernel gives other last bits at every call; return what was printed."""
    return run_alone(__file__, _NOISY, str(share), planted, kind, *more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["backward", "atomics", "rarely"])
def test_gradients_that_eager_cannot_repeat_are_compared_where_it_can(kind: str) -> None:
    out, err = in_a_noisy_process(2**-22, "right", kind)
    assert out.startswith("planned"), out + err
    assert "the planned step equals eager's bit by bit" in err or kind == "rarely"


def test_a_wrong_gradient_is_found_among_noisy_ones() -> None:
    out, _ = in_a_noisy_process(2**-22, "planted", "backward")
    assert out.startswith("refused")
    assert "first of all threshold_backward" in out
    assert "the gradient of parameter '0.0.weight' (by 1.0e-02 of its norm)" in out


@pytest.mark.slow
def test_what_differs_by_more_than_rounding_is_refused() -> None:
    out, _ = in_a_noisy_process(10.0, "right", "backward")
    assert out.startswith("refused")
    assert "They differ between two eager steps already" in out


@pytest.mark.slow
def test_what_gives_other_bits_the_second_time_is_never_run_again() -> None:
    out, _ = in_a_noisy_process(2**-22, "right", "forward")
    assert out.startswith("planned")
    assert "'abs'" not in out


def test_a_search_for_algorithms_is_answered_by_the_bits_without_it() -> None:
    out, err = in_a_noisy_process(2**-22, "right", "searched")
    assert out.startswith("planned ['abs'")
    assert "the planned step equals eager's bit by bit" in err


@pytest.mark.slow
@pytest.mark.parametrize(("share", "planted"), [(2**-22, "planted"), (0.5, "right")])
def test_a_search_for_algorithms_excuses_nothing_else(share: float, planted: str) -> None:
    out, _ = in_a_noisy_process(share, planted, "searched")
    assert out.startswith("refused")


@pytest.mark.slow
def test_deterministic_algorithms_are_compared_bit_by_bit() -> None:
    """A gradient that is wrong within the noise is seen where there is none."""
    for planted, more, expected in (
        ("right", ["deterministic"], "planned"),
        ("planted", [], "planned"),
        ("planted", ["deterministic"], "refused"),
    ):
        out, err = in_a_noisy_process(2**-22, planted, "atomics", *more)
        assert out.startswith(expected), out + err
        # The plan in use is the one for the usual kernels, tested as they are.
        assert ("equals eager's bit by bit" in err) == (planted == "right")


# ---------------------------------------------------------------------- kernels as in the forward


@pytest.mark.slow
@pytest.mark.parametrize("settable", [True, False])
def test_recomputed_forwards_run_with_the_flags_of_the_forward(
    settable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The convolution has two kernels on a CPU, with other bits; the flag chooses.

    `torch.backends.disable_global_flags` forbids a program to set it otherwise than by `flags()`.
    """
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", settable)
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(12))
    model = nn.Sequential(*blocks)
    sample = torch.randn(4, 8, 16, 16)
    eager = eager_copy(model)
    with without_onednn():
        module = feasible(model, sample, 0.5)
    for net in (module, eager):
        with without_onednn():
            result = net(sample)
        result.square().mean().backward()
    assert module.plan.overhead > 0
    for (name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    assert torch.backends.mkldnn.enabled


@pytest.mark.filterwarnings("ignore:the gradients of Sequential .* within autocast")  # casts
def test_a_backward_within_autocast_recomputes_without_it() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    sample = torch.randn(64, 64)
    eager = eager_copy(model)
    module = feasible(model, sample, 0.5)
    assert module.plan.overhead > 0
    for net in (module, eager):
        result = net(sample).square().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result.backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_launch_bound_step_is_planned_by_the_time_of_the_host() -> None:
    model, sample = network("tied")
    with fake_cuda(launch_ms=50.0):
        module = Rockmate(model, sample, 1.0, self_test=False)
        measured = plan_of(module).network.measured
    assert measured.is_launch_bound
    assert all(cost.time_ms >= 50.0 for cost in measured.costs.values())
    with fake_cuda(launch_ms=0.0):
        module = Rockmate(model, sample, 1.0, self_test=False)
        measured = plan_of(module).network.measured
    assert not measured.is_launch_bound
    assert measured.device_ms > 0
