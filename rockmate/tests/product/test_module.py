"""The wrapper's manners: names, modes, types and budgets."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from rockmate import CheckpointedModule, Rockmate
from rockmate.settings import parse_budget
from runs.planned import wrap
from zoo.nets import hugging_face_gpt2, network

# ---------------------------------------------------------------------- interface


def test_the_other_published_name_is_the_same_class() -> None:
    assert CheckpointedModule is Rockmate


def test_parameters_buffers_and_keys_are_the_originals() -> None:
    model, sample = network("resnet")
    wrapped = wrap(model, sample, "1MiB")
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(wrapped.buffers(), model.buffers(), strict=True))
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert wrapped.fc is model.fc
    assert wrapped.original is model


def test_published_backward_call_is_harmless() -> None:
    model, sample = network("tied")
    wrapped = wrap(model, sample, "1MiB")
    loss = wrapped(*sample)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    wrapped.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "kwargs"])
def test_every_form_of_sample(form: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            return self.linear(x) * scale

    model, x = Scaled(), torch.randn(3, 4)
    samples: dict[str, tuple[Any, dict[str, Any] | None]] = {
        "tensor": (x, None),
        "tuple": ((x, 3.0), None),
        "dict": ({"x": x, "scale": 3.0}, None),
        "kwargs": (x, {"scale": 3.0}),
    }
    sample, kwargs = samples[form]
    wrapped = wrap(model, sample, "1MiB", kwargs=kwargs)
    call = (x,) if form == "tensor" else (x, 3.0) if form == "tuple" else ()
    named = {"x": x, "scale": 3.0} if form == "dict" else {}
    if form == "kwargs":
        call, named = (x,), {"scale": 3.0}
    assert torch.equal(wrapped(*call, **named), model(*call, **named))


def test_eval_and_no_grad_run_the_original() -> None:
    model, sample = network("resnet")
    calls = []
    wrapped = wrap(model, sample, "1MiB")
    original = model.forward
    model.forward = lambda *a: calls.append(1) or original(*a)  # type: ignore[method-assign]
    with torch.no_grad():
        wrapped(*sample)
    wrapped.eval()
    assert not model.training
    assert not model.fc.training
    wrapped(*sample)
    assert len(calls) == 2
    del model.forward
    wrapped.train()
    assert model.training
    wrapped(*sample).backward()
    assert model.fc.weight.grad is not None


def test_outputs_keep_their_types() -> None:
    pytest.importorskip("transformers", reason="transformers is a test extra")
    model = hugging_face_gpt2(layers=1, width=16, vocab=40, length=16)
    ids = torch.randint(0, 40, (2, 8))
    wrapped = wrap(model, {"input_ids": ids, "labels": ids}, "1MiB")
    result = wrapped(input_ids=ids, labels=ids)
    assert type(result) is type(model(input_ids=ids, labels=ids))
    result.loss.backward()
    # The sample passed one tensor twice; another pair must not be confused.
    other = torch.randint(0, 40, (2, 8))
    state = torch.get_rng_state()
    ours = wrapped(input_ids=ids, labels=other).loss
    torch.set_rng_state(state)
    assert torch.equal(ours, model(input_ids=ids, labels=other).loss)


@pytest.mark.slow
def test_the_plan_prints_as_a_table() -> None:
    model, sample = network("gpt")
    text = str(wrap(model, sample, 0.6).plan)
    for word in ("budget", "peak", "overhead", "blocks."):
        assert word in text, text


def test_import_stays_light() -> None:
    code = (
        "import rockmate, sys; heavy = {'gurobipy', 'graphviz', 'matplotlib', 'highspy', "
        "'ortools', 'rkgb.pictures', 'rkgb.published'} & set(sys.modules); print(sorted(heavy))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_planning_leaves_the_compiler_of_torch_alone() -> None:
    code = (
        "import sys, torch, rockmate, rotor; from torch import nn; "
        "model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4); "
        "rockmate.Rockmate(model, x, 1.0, cache=False); symbols = {'sympy'} & set(sys.modules); "
        "rotor.Checkpointable(model, x); "
        "print(sorted({'torch._dynamo', 'torch._inductor'} & set(sys.modules) | symbols))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"  # they take a second to import


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (123, (123, None)),
        ("2GiB", (2 * 1024**3, None)),
        ("800 MB", (800 * 1000**2, None)),
        ("1.5kib", (1536, None)),
        (0.5, (None, 0.5)),
        (1.0, (None, 1.0)),
        ("40%", (None, 0.4)),
        ("8G", (8 * 10**9, None)),
        ("8Gi", (8 * 2**30, None)),
        ("300k", (300_000, None)),
        ("1_000_000", (1_000_000, None)),
        ("0.6", (None, 0.6)),
    ],
)
def test_budgets_are_read(given: Any, meant: Any) -> None:
    assert parse_budget(given) == meant


@pytest.mark.slow
def test_reserve_is_kept_free() -> None:
    model, sample = network("gpt")
    full = wrap(model, sample, 0.8)
    kept = wrap(model, sample, full.budget_bytes, reserve=full.budget_bytes // 5)
    assert kept.plan.peak_bytes <= full.budget_bytes - full.budget_bytes // 5


def test_names_promised_by_the_package_exist() -> None:
    assert all(hasattr(rockmate, name) for name in rockmate.__all__)


@pytest.mark.parametrize("in_place", [False, True])
def test_slices_of_a_planned_sequence_are_plain(in_place: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    planned = rockmate.apply(model, x, "1MiB") if in_place else Rockmate(model, x, "1MiB")
    part: Any = planned[:2]  # type: ignore[index,operator]
    assert type(part) is nn.Sequential
    assert [*part] == [*model][:2]
    assert torch.equal(part(x), model[1](model[0](x)))
