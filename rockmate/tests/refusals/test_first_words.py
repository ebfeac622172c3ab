"""What a user reads first when something is asked wrongly: what to do, in one class of errors."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkgb
import rockmate
from rkgb.pictures import render
from rockmate import Rockmate, RockmateError

X = torch.randn(8, 16)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> None:
        self.linear(x)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        return (h.exp() if h.sum() > 0 else h).square()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize(
    ("wrong", "builtin", "words"),
    [
        (lambda: Rockmate(X, model(), 0.5), ValueError, "the model comes first"),
        (lambda: rockmate.apply(X, model(), 0.5), ValueError, "the model comes first"),
        (lambda: rockmate.apply_to_blocks(X, model(), 0.5), ValueError, "the model comes first"),
        (lambda: rockmate.estimate(X, model()), ValueError, "the model comes first"),
        (lambda: Rockmate(nn.Linear, X, 0.5), ValueError, r"give one of its objects, Linear\("),
        (lambda: Rockmate(model(), 0.5, X), ValueError, "the budget is a Tensor; it comes third"),
        (lambda: Rockmate(model(), X.numpy(), 0.5), RuntimeError, r"torch\.from_numpy\(sample\)"),
        (
            lambda: Rockmate(model(), "text", 0.5),
            RuntimeError,
            "give as the sample what the tokenizer",
        ),
        (lambda: Rockmate(model(), None, 0.5), RuntimeError, "such as a tensor"),
        (lambda: Rockmate(Nothing(), X, 0.5), ValueError, r"let Nothing.forward \(test_first"),
        (lambda: rockmate.apply(Nothing(), X, 0.5), ValueError, "return the output or the loss"),
        (lambda: Rockmate(model(), X), TypeError, "needs a budget"),
        (lambda: Rockmate(model(), X, 0.5, efort="best"), TypeError, "did you mean 'effort'"),
        (lambda: Rockmate(model(), X, 0.5, plan="p", compile=True), ValueError, "exclude each"),
        (lambda: Rockmate(model(), X, 0.5, opaque=["3x"]), ValueError, "opaque names '3x'"),
        (lambda: Rockmate(model(), X, 0.5, reserve="1"), ValueError, "a number of bytes"),
        (lambda: torch.jit.script(Rockmate(model(), X, 1.0)), ValueError, r"script\(rk.original\)"),
        (lambda: Rockmate(Decides(), X, 0.5, strict=True), RuntimeError, "use torch.where"),
        (lambda: Rockmate(Decides(), X, 64), ValueError, "strict=True says what, and at which"),
    ],
)
def test_errors_say_what_to_do(
    wrong: Callable[[], object], builtin: type[Exception], words: str
) -> None:
    with pytest.raises(RockmateError, match=words) as caught:
        wrong()
    assert isinstance(caught.value, builtin)


def test_errors_of_rkgb_are_of_the_same_class() -> None:
    assert issubclass(rkgb.RkgbError, RockmateError)


def test_a_later_call_without_output_runs() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, quiet: bool = False) -> torch.Tensor | None:
            y: torch.Tensor = self.linear(x)
            return None if quiet else y

    rk = Rockmate(Sometimes(), X, 1.0)
    assert rk(X, quiet=True) is None


def test_budgets_that_are_too_small_begin_with_what_is_enough() -> None:
    with pytest.raises(rockmate.InfeasibleBudgetError) as caught:
        Rockmate(model(), X, 40)
    error = caught.value
    first, *details = str(error).splitlines()
    assert first.startswith(f"the budget must be at least {error.minimum_bytes} bytes")
    assert details
    assert not any("nodes" in line or " 0 %" in line for line in details)
    assert "module '" in details[0]
    Rockmate(model(), X, error.minimum_bytes)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rk = Rockmate(model(), X, 1.0)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RockmateError, match=r"pip install 'rockmate\[plot\]'"):
        rk.plan.plot()


def test_a_missing_program_for_pictures_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    render.print_once.cache_clear()
    monkeypatch.setattr("shutil.which", lambda _: None)
    rkgb.print_all_graphs(rkgb.make_all_graphs(model(), X), folder=tmp_path)
    said = capsys.readouterr().out
    assert said.count("Install it") == 1
    assert said.count("wrote ") == 4


def test_counted_costs_print_no_milliseconds() -> None:
    rk = Rockmate(model(), X, 1.0, cost="flops")
    recomputed = str(rk.plan).partition("-- Plan")[2]
    assert "not measured: FLOPs are counted" in recomputed
    assert not any(word in ("ms", "us") for word in recomputed.split())


def test_plans_print_at_most_a_screen() -> None:
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(30)])
    rk = Rockmate(deep, X, 0.4, cost="flops")
    assert len(str(rk.plan).splitlines()) <= 40
    assert "\n" not in repr(rk.plan)
