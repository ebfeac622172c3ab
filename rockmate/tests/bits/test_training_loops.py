"""Training loops, parameters and modes: everything that users do around a module."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oracles.training import assert_trains_like, eager_copy
from rkgb.engine import trace_memory
from runs.planned import wrap
from zoo.nets import network


def same_state(first: nn.Module, second: nn.Module) -> None:
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(first.buffers(), second.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def alike(run: Callable[[nn.Module], Any], name: str, budget: Any = 0.8) -> None:
    """Run a loop on an eager twin and on the wrapped module, from one random state."""
    model, sample = network(name)
    twin = eager_copy(model)
    wrapped = wrap(model, sample, budget)
    state = torch.get_rng_state()
    run(twin)
    end = torch.get_rng_state()
    torch.set_rng_state(state)
    run(wrapped)
    assert torch.equal(torch.get_rng_state(), end)
    same_state(model, twin)


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_clipping_and_zero_grad(set_to_none: bool) -> None:
    _, sample = network("gpt")

    def run(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            for _ in range(2):
                (model(*sample) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    alike(run, "gpt")


def test_several_optimizers() -> None:
    _, sample = network("resnet")

    def run(model: nn.Module) -> None:
        parameters = list(model.parameters())
        optimizers = [
            torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.9),
            torch.optim.Adam(parameters[1::2], lr=0.01),
        ]
        for step in range(3):
            model(*sample).backward()
            optimizers[step % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    alike(run, "resnet")


@pytest.mark.slow
def test_optimizer_step_inside_backward() -> None:
    _, sample = network("gpt")

    def run(model: nn.Module) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for _ in range(3):
            model(*sample).backward()
        for handle in handles:
            handle.remove()

    alike(run, "gpt", 0.6)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_the_wrapper_fire_as_on_a_module() -> None:
    model, sample = network("mixer")
    twin = eager_copy(model)
    wrapped = wrap(model, sample)
    counts = []
    for module in (twin, wrapped):
        fired: list[str] = []
        module.register_forward_pre_hook(lambda *_, fired=fired: fired.append("pre"))
        module.register_forward_hook(lambda *_, fired=fired: fired.append("forward"))
        module.register_full_backward_hook(lambda *_, fired=fired: fired.append("backward"))
        for _ in range(2):
            module(*sample).backward()
        counts.append(fired)
    assert counts[0] == counts[1]


def test_two_losses_one_after_the_other() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.dropout(torch.tanh(self.norm(self.a(x))), 0.3)
            return h.square().sum(), torch.sigmoid(self.b(h)).sum()

    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 8)
    twin = eager_copy(model)
    wrapped = wrap(model, x, "1MiB")
    for _ in range(3):
        state = torch.get_rng_state()
        for module in (twin, wrapped):
            torch.set_rng_state(state)
            first, second = module(x)
            other, _ = module(2 * x)  # another step between the two
            first.backward(retain_graph=True)
            other.backward()
            second.backward(retain_graph=True)
            (first + second).backward()
            torch.rand(3)
        end = torch.get_rng_state()
        torch.set_rng_state(state)
        same_state(model, twin)
        torch.set_rng_state(end)


@pytest.mark.slow
def test_a_second_backward_stays_in_the_budget() -> None:
    model, sample = network("gpt")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 0.6)
    state = torch.get_rng_state()
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        module(*sample).backward()  # so that gradients exist
        loss = module(*sample)

        def two(_span: Any, loss: Tensor = loss) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

        peak = trace_memory(two, torch.device("cpu")).peak_bytes
    assert peak <= wrapped.budget_bytes
    same_state(model, twin)


def test_hundreds_of_steps_do_not_grow() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, 1.0)
    process = psutil.Process()

    def steps(count: int) -> int:
        for _ in range(count):
            wrapped(*sample).backward()
            wrapped(*sample)  # and forwards that nobody differentiates
        gc.collect()
        return process.memory_info().rss

    before = steps(50)
    assert steps(300) - before < 4 << 20


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_parametrizations(kind: str) -> None:
    norm = getattr(nn.utils.parametrizations, kind)
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    twin = eager_copy(model)
    assert_trains_like(wrap(model, x, "1MiB"), twin, x)


def test_replaced_parameters_are_looked_up_anew() -> None:
    model, sample = network("tied")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 1.0)
    for module in (model, twin):
        module.first.bias = nn.Parameter(torch.linspace(0, 1, 48))
        module.first.weight.data = module.first.weight.data * 2
    wrapped(*sample).backward()
    twin(*sample).backward()
    same_state(model, twin)


def test_another_precision_after_planning() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, "1MiB")
    wrapped.double()
    assert model.first.weight.dtype == torch.float64
    twin = eager_copy(model)
    assert_trains_like(wrapped, twin, (sample[0].double(),))
    assert "'first.weight' was float32[48, 48] on cpu and is float64" in wrapped.plans[-1].why


def test_a_layer_shared_between_two_wrapped_modules() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    pair = nn.ModuleList(
        [nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(8, 8), shared, nn.Dropout(0.2))]
    )
    twins = copy.deepcopy(pair)
    x = torch.randn(4, 8)
    wrapped = [wrap(module, x, "1MiB") for module in pair]
    state = torch.get_rng_state()
    (wrapped[0](x).sum() + wrapped[1](x).square().sum()).backward()
    torch.set_rng_state(state)
    (twins[0](x).sum() + twins[1](x).square().sum()).backward()
    same_state(pair, twins)


def test_a_grad_scaler() -> None:
    _, sample = network("mixer")

    def run(model: nn.Module) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*sample)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    alike(run, "mixer", "4MiB")


def test_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model, sample = network("unet")
        twin = eager_copy(model)
        assert_trains_like(wrap(model, sample, 1.0), twin, sample)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inference_mode_runs_the_original() -> None:
    model, sample = network("mixer")
    wrapped = wrap(model, sample)
    with torch.inference_mode():
        result = wrapped(*sample)
    assert result.is_inference()
    wrapped(*sample).backward()


def test_complex_parameters() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 9, dtype=torch.cfloat))
            self.mix = nn.Linear(9, 9, dtype=torch.cfloat)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(self.mix(torch.fft.rfft(x) * self.weight)).square().mean()

    torch.manual_seed(0)
    model, x = Filter(), torch.randn(4, 16)
    twin = eager_copy(model)
    assert_trains_like(wrap(model, x, "1MiB"), twin, x)


def test_several_threads_at_once() -> None:
    model, sample = network("mixer")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that all threads draw the same
    wrapped = wrap(model, sample)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(*sample), parameters)
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(4):
                found = torch.autograd.grad(wrapped(*sample), parameters)
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    failures.append("other bits")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_part_of_the_model_in_eval_mode() -> None:
    model, sample = network("gpt")
    model.drop.eval()
    twin = eager_copy(model)
    assert_trains_like(wrap(model, sample), twin, sample)


class _Bomb(TorchDispatchMode):
    """Raises at the n-th operation, as an allocation that fails would."""

    only_watches = True

    def __init__(self, count: int, error: type[BaseException]) -> None:
        super().__init__()
        self.count, self.error = count, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count -= 1
        if self.count == 0:
            raise self.error("in the middle")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("count", [3, 40, 90])
def test_an_exception_anywhere_leaves_a_module_that_works(
    error: type[BaseException], count: int
) -> None:
    model, sample = network("resnet")
    wrapped = wrap(model, sample)
    buffers = [b.clone() for b in model.buffers()]
    with pytest.raises(error), _Bomb(count, error):
        wrapped(*sample).backward()
    with torch.no_grad():  # as far as it came the forward has updated them, like eager's
        for buffer, old in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(old)
    model.zero_grad()
    gc.collect()
    twin = eager_copy(model)
    assert_trains_like(wrapped, twin, sample)


def test_other_manners_of_a_module() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, 1.0)
    assert isinstance(wrapped, nn.Module)
    assert isinstance(wrapped, type(model))
    assert type(wrapped).__name__ == wrapped._get_name() == "TiedMLP"
    assert "TiedMLP" in repr(wrapped)
    assert "predicted peak" in repr(wrapped)
    seen: list[nn.Module] = []
    wrapped.apply(seen.append)
    assert model.first in seen
    wrapped.share_memory()
    assert model.first.weight.is_shared()
    wrapped.half()
    assert model.first.weight.dtype == torch.float16
    wrapped.float()
    wrapped.requires_grad_(True)
    wrapped(*sample).backward()
    unwrapped = wrapped.original
    assert unwrapped is model
    assert not any(
        vars(m)[h] for m in model.modules() for h in ("_forward_hooks", "_backward_hooks")
    )
    unwrapped(*sample).backward()
