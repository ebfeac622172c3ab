"""Where eager differs from itself, values are taken of what differs alone, and once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb.device import RngState
from rkgb.engine import Sample
from rockmate import SelfTestError
from rockmate.comparison.agreement import agree
from rockmate.comparison.eager import Keep, StepResult, named_results, run_step
from rockmate.comparison.values import Values, distance, norm


def test_distances_are_those_of_whole_tensors() -> None:
    torch.manual_seed(0)
    for shape, dtype in (((3, 5), torch.float32), ((), torch.float64), ((7,), torch.bfloat16)):
        a, b = (torch.randn(shape).to(dtype) for _ in range(2))
        expected = float(torch.linalg.vector_norm(a.double() - b.double()))
        assert distance(a, b) == pytest.approx(expected, rel=1e-12)
        assert norm(a) == pytest.approx(float(torch.linalg.vector_norm(a.double())), rel=1e-12)
    large = torch.randn(3, 1000, 1000)
    for a, b in ((large, large + 1), (large.transpose(0, 2), large.transpose(0, 2) + 1)):
        expected = float(torch.linalg.vector_norm(a.double() - b.double()))
        assert distance(a, b) == pytest.approx(expected, rel=1e-9)
    nan = torch.tensor([torch.nan, 1.0])
    assert distance(nan, nan.clone()) == 0.0
    assert distance(nan, torch.tensor([1.0, 1.0])) != 0.0
    assert distance(torch.ones(2), torch.ones(3)) == distance(1, 2) == float("inf")
    complex_ones = torch.ones(2, dtype=torch.complex64)
    assert distance(complex_ones, 2j * complex_ones) == pytest.approx(10**0.5)


class Noisy(nn.Module):
    """Its first gradient has other last bits at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x)
        factor = 1.0 + 2.0**-22 * (self.calls % 4)
        hidden.register_hook(lambda grad: grad * factor)
        return self.second(hidden).square().mean()


def steps(model: Noisy, taken: list[tuple[Any, StepResult]], factor: float = 1.0) -> Any:
    def run(keep: Keep) -> StepResult:
        hook = model.second.weight.register_hook(lambda grad: grad * factor)
        try:
            found = run_step(model, model, Sample.of(model, x), keep=keep)
        finally:
            hook.remove()
        taken.append((keep, found))
        return found

    x = torch.ones(4, 8)
    return run


def test_one_copy_is_kept_of_what_differs_alone() -> None:
    torch.manual_seed(0)
    model, taken = Noisy(), list[tuple[Any, StepResult]]()
    run = steps(model, taken)
    text = agree(run("fingerprints"), run("fingerprints"), run, run, "Noisy", {"op": "nothing"})
    assert "2 of 4 gradients differ between 3 eager steps" in text
    kept = [
        name
        for keep, step in taken
        for name, value in named_results(step).items()
        if isinstance(value, Tensor)
    ]
    assert kept == [f"the gradient of parameter 'first.{name}'" for name in ("weight", "bias")]
    compared = [step for keep, step in taken if isinstance(keep, Values) and keep.first]
    assert len(compared) == 3
    assert all(isinstance(step.stream, RngState) for step in compared)


def test_what_eager_repeats_is_demanded_bit_by_bit_and_noise_within_its_size() -> None:
    torch.manual_seed(0)
    model = Noisy()
    eager, wrong = steps(model, []), steps(model, [], 1 + 1e-3)
    with pytest.raises(SelfTestError, match=r"'second.weight' \(by 1.0e-03 of its norm\)"):
        agree(eager("fingerprints"), wrong("fingerprints"), eager, wrong, "Noisy")
