"""Attributes, buffers and hooks: what a plain forward leaves behind, a planned one leaves, too."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from rockmate import Rockmate


def bits(model: nn.Module, samples: list[Tensor]) -> list[Any]:
    """Return every bit of some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for sample in samples:
        optimizer.zero_grad()
        result = model(sample)
        result.square().mean().backward()
        optimizer.step()
        seen.append(result.detach().clone())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [b.clone() for b in model.buffers()]
    return seen


def assert_same_bits(
    model: nn.Module, twin: nn.Module | None = None, plans: int = 1, budget: Any = "1MiB"
) -> Any:
    twin = copy.deepcopy(model) if twin is None else twin
    samples = [torch.randn(8, 16) for _ in range(4)]
    wrapped = Rockmate(model, samples[0], budget)
    found, expected = bits(wrapped, samples), bits(twin, samples)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(wrapped.plans) == plans
    return wrapped, twin


class Remembering(nn.Module):
    """Keeps a tensor, a size and a buffer of its own making."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.last, self.rows = y, x.shape[0]
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y * (self.average + 1)


def test_attributes_and_buffers_that_a_forward_sets() -> None:
    torch.manual_seed(0)
    wrapped, twin = assert_same_bits(nn.Sequential(Remembering(), nn.Linear(16, 16)))
    assert wrapped.plan.opaque == ()
    assert torch.equal(wrapped[0].last, twin[0].last)
    assert wrapped[0].rows == 8
    assert torch.equal(wrapped[0].average, twin[0].average)
    wrapped(torch.randn(8, 16))
    wrapped[0].last.sum().backward()  # a gradient flows back from what is remembered


def test_hooks_that_compute_a_weight() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these forms are old, and in use
            layers = [
                nn.utils.weight_norm(nn.Linear(16, 16)),
                nn.Tanh(),
                nn.utils.spectral_norm(nn.Linear(16, 16)),
                nn.Tanh(),
                nn.Linear(16, 16),
            ]
        prune.random_unstructured(layers[-1], "weight", amount=0.5)
        return nn.Sequential(*layers)

    wrapped, twin = assert_same_bits(model(), model())
    assert wrapped.plan.opaque == ()
    assert torch.equal(wrapped[0].weight, twin[0].weight)


def test_hooks_that_look_see_the_tensors_of_every_step_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda _module, _args, out: seen.append(out))
    twin = copy.deepcopy(model)
    theirs: list[Tensor] = []
    twin[1]._forward_hooks.clear()
    twin[1].register_forward_hook(lambda _module, _args, out: theirs.append(out))
    sample = torch.randn(8, 16)
    wrapped = Rockmate(model, sample, "1MiB")
    seen.clear()
    for module, features in ((wrapped, seen), (twin, theirs)):
        loss = module(sample).sum() + features[-1].square().sum()
        loss.backward()
    assert len(seen) == 1, "not called again by a recomputation"
    assert torch.equal(seen[0], theirs[0])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_hook_that_removes_itself_is_called_by_the_first_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    twin, x = copy.deepcopy(model), torch.randn(8, 16)
    found: dict[nn.Module, list[int]] = {model: [], twin: []}
    handles: dict[nn.Module, Any] = {}
    for net in found:

        def once(_module: nn.Module, _args: Any, out: Tensor, net: nn.Module = net) -> None:
            found[net].append(len(out))
            handles[net].remove()

        handles[net] = net[1].register_forward_hook(once)  # type: ignore[index, operator, union-attr]
    wrapped = Rockmate(model, x, "1MiB", cost="flops")
    assert model[1]._forward_hooks, "planning leaves no trace"
    found[model].clear()
    assert all(map(torch.equal, bits(wrapped, [x, x]), bits(twin, [x, x])))
    assert found[model] == found[twin] == [8]
    assert not model[1]._forward_hooks


def test_what_a_hook_looks_at_is_expected_to_get_no_gradient() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*blocks)
    model[2].register_forward_hook(lambda _module, _args, out: None)
    # With another recording inside the self-test, its step would be above the budget.
    wrapped = Rockmate(model, torch.randn(64, 32), 0.8, cost="flops")
    assert wrapped.measured_peak_bytes == wrapped.plan.peak_bytes


def test_backward_hooks_of_submodules_are_called_in_steps_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    twin = copy.deepcopy(model)
    found: dict[nn.Module, list[Tensor]] = {model: [], twin: []}
    for net, seen in found.items():
        net[1].register_full_backward_pre_hook(  # type: ignore[index, operator, union-attr]
            lambda _module, grad_out, seen=seen: seen.append(grad_out[0].clone())
        )
        net[1].register_full_backward_hook(  # type: ignore[index, operator, union-attr]
            lambda _module, grad_in, _grad_out: (grad_in[0] * torch.rand_like(grad_in[0]),)
        )
    sample = torch.randn(8, 16)
    wrapped = Rockmate(model, sample, "1MiB")
    assert wrapped.plan.opaque == ("1",)
    assert not found[model], "planning leaves no trace"
    for _ in range(3):
        for net in (wrapped, twin):
            torch.manual_seed(1)
            net(sample).sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert len(found[model]) == 3
    assert all(map(torch.equal, found[model], found[twin]))


def test_a_module_that_counts_its_calls_runs_whole_and_counts() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.tanh() * min(self.calls, 3)

    torch.manual_seed(0)
    wrapped, twin = assert_same_bits(nn.Sequential(nn.Linear(16, 16), Counting()))
    assert wrapped.plan.opaque == ("1",)
    assert wrapped[1].calls == twin[1].calls == 4
