"""What changes between steps: every call is planned for, exact, and nothing is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rockmate
from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory
from rockmate import Rockmate
from zoo.nets import hugging_face_gpt2


def wrap(model: nn.Module, sample: Any, budget: Any = "1MiB", **options: Any) -> Rockmate:
    return Rockmate(model, sample, budget, cost="flops", **options)


class Net(nn.Module):
    """Numbers, flags, a mask that may be given, dropout that asks the root's flag."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 12)
        )
        self.head = nn.Linear(12, 4)
        self.temperature = 1.0
        self._scales = [1.0, 0.5]

    def forward(self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> Tensor:
        y = self.body(x) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        y = F.dropout(y, 0.3, self.training) * self._scales[-1]
        return self.head(y) / self.temperature

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {  # gradients that lie in memory in three ways
    "square": lambda y: y.square().mean(),
    "sum": lambda y: y.sum(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(len(y))).sum(),
}


def alike(
    first: nn.Module, second: nn.Module, *args: Any, loss: str = "square", **kwargs: Any
) -> None:
    """One step each, from one random state: the same bits everywhere."""
    state = torch.get_rng_state()
    results, ends = [], []
    for module in (first, second):
        torch.set_rng_state(state)
        result = module(*args, **kwargs)
        if result.requires_grad:
            LOSSES[loss](result).backward()
        results.append(result)
        ends.append(torch.get_rng_state())
    assert torch.equal(*results)
    assert results[0].requires_grad == results[1].requires_grad
    assert torch.equal(*ends)
    assert_same_gradients(first, second)
    for ours, theirs in zip(first.buffers(), second.buffers(), strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------- flags


@pytest.mark.slow
def test_flags_set_one_by_one_are_what_counts() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    rk = wrap(model, x)
    for module in (rk, twin):
        was = {name: m.training for name, m in module.named_modules()}
        module.eval()
        for name, m in module.named_modules():  # as Lightning does after a validation
            m.training = was[name]
    assert rk.training
    assert model.training
    alike(rk, twin, x)
    for module in (rk, twin):
        for m in module.modules():
            m.training = False
    alike(rk, twin, x)
    assert len(rk.plans) == 1, "nothing trains: the original runs"
    for module in (rk, twin):
        module.body[1].training = True  # the root stays in eval mode
    alike(rk, twin, x)
    for module in (rk, twin):
        module.train()
        module.body.eval()
    alike(rk, twin, x)
    for module in (rk, twin):
        module.train()
    alike(rk, twin, x)
    assert len(rk.plans) == 3
    assert "module '(root)' in eval mode" in rk.plans[0].why


def test_a_frozen_batch_norm_stays_in_eval_mode() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    for module in (model, twin):
        module.body[1].eval().requires_grad_(False)
    rk = wrap(model, x)
    alike(rk, twin, x)
    for module in (rk, twin):
        module.train()
    alike(rk, twin, x)


def test_where_nothing_wants_a_gradient_the_original_runs() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    rk = wrap(model, x)
    alike(rk, twin, x)
    for module in (rk, twin):
        module.requires_grad_(False)
    alike(rk, twin, x)
    for module in (rk, twin):
        module.requires_grad_(True)
    alike(rk, twin, x)
    assert len(rk.plans) == 1


# ---------------------------------------------------------------------- attributes and layers


@pytest.mark.slow
def test_what_is_set_on_the_wrapper_reaches_the_model() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    rk = wrap(model, x)
    for module in (rk, twin):
        module.temperature = 10.0
    assert model.temperature == 10.0
    alike(rk, twin, x)
    for module in (rk, twin):
        module._scales[-1] = 0.25  # private, and inside a list
    alike(rk, twin, x)
    for module in (rk, twin):
        torch.manual_seed(1)
        module.body[4] = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 12))
        module.head.bias = None
        module.extra = nn.Parameter(torch.zeros(3))
    assert model.extra is rk.extra
    alike(rk, twin, x)
    for module in (rk, twin):
        del module.extra
    assert not hasattr(model, "extra")
    alike(rk, twin, x)
    rk.loss(x).backward()


def test_a_sequential_is_edited_through_the_wrapper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    rk = wrap(model, x)
    assert len(rk) == 3
    for module in (rk, twin):
        module[1] = nn.Sigmoid()
        del module[2]
        module.append(nn.LayerNorm(8))
    alike(rk, twin, x)
    assert isinstance(model[1], nn.Sigmoid)


def test_a_layer_of_the_same_kind_needs_no_new_plan() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    rk = wrap(model, x)
    for module in (rk, twin):
        torch.manual_seed(2)
        module.head = nn.Linear(12, 4)
    alike(rk, twin, x)
    assert len(rk.plans) == 1


def test_a_tie_that_is_cut() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    rk = wrap(model, x)
    alike(rk, twin, x)
    for module in (rk, twin):
        module[2].weight = nn.Parameter(module[0].weight.detach() * 2)
    alike(rk, twin, x)


class Adapter(nn.Module):
    """LoRA as libraries put it in."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        self.scaling = {"default": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scaling["default"]


@pytest.mark.slow
def test_adapters_precision_and_methods_after_wrapping() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    rk = wrap(model, x)
    for module in (rk, twin):
        torch.manual_seed(1)
        module.requires_grad_(False)
        module.body[0] = Adapter(module.body[0])
        module.head = Adapter(module.head)
    alike(rk, twin, x)
    for module in (rk, twin):
        module.head.scaling["default"] = 2.0
    alike(rk, twin, x)
    for module in (rk, twin):
        module.to(torch.bfloat16)
    alike(rk, twin, x.bfloat16())
    count = len(rk.plans)
    rk.loss(x.bfloat16()).backward()
    assert len(rk.plans) == count, "a method that calls the module runs its plan"


# ---------------------------------------------------------------------- numbers


def test_a_number_on_a_schedule_needs_no_planning(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    rk = wrap(model, (x, 0.7))
    for step in range(5):
        for module in (rk, twin):
            module._scales[-1] = 1.0 + step / 3
        alike(rk, twin, x, 2.0 - step / 7)
    assert [row.how for row in rk.plans[1:]] == ["recorded"] * 5
    alike(rk, twin, x, 0.0)
    alike(rk, twin, x, -0.0)
    rk._rockmate.plans.most = 4
    count = len(rk.plans)
    for step in range(6):  # those of a call that only enter arithmetic are recorded no more
        alike(rk, twin, x, 5.0 + step)
    assert len(rk.plans) == count
    for step in range(8):
        for module in (rk, twin):
            module._scales[-1] = 5.0 + step
        alike(rk, twin, x, 0.7)
    assert rk.plans[0].how == "planned", "numbers do not drive plans out"
    assert len(rk.plans) == 4
    assert caplog.text.count("Pass a number that changes at every step as a tensor") == 1
    alike(rk, twin, x, scale=1)


# ---------------------------------------------------------------------- keys, memory, reports


def test_no_call_keeps_its_tensors_alive() -> None:
    rk = wrap(Net(), torch.randn(6, 8))

    def step(rows: int) -> list[weakref.ref[Tensor]]:
        x = torch.randn(rows, 8)
        own = torch.ones(3)
        y = rk(x)
        loss = y.sum()
        loss.backward()
        return [weakref.ref(t) for t in (x, y, loss, own)]

    step(5)
    gc.collect()
    gc.disable()
    try:
        for rows in (6, 5, 4, 6):  # 4 is new
            assert [t() for t in step(rows)] == [None] * 4
    finally:
        gc.enable()


def test_memory_after_200_steps_of_changing_keys_is_that_after_20() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    rk = wrap(model, torch.randn(3, 4), max_plans=2, self_test=False)

    def held(steps: range) -> tuple[int, int]:
        """Take steps; return how many objects there are, and the bytes of tensors."""
        for step in steps:
            loss = rk(torch.randn(3 + step % 7, 4))
            (loss.sum() if step % 3 else loss.square().sum()).backward()
            model.append(nn.Tanh()) if step % 5 == 0 else None
            if len(model) > 4:
                del model[2:]
        del loss
        gc.collect()
        found = gc.get_objects()
        tensors = (o for o in found if type(o) in (Tensor, nn.Parameter))
        storages = [o.untyped_storage() for o in tensors if o.layout == torch.strided]
        return len(found), sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    objects, tensor_bytes = held(range(20))
    more_objects, more_bytes = held(range(20, 200))
    assert more_objects < 1.02 * objects
    assert more_bytes == tensor_bytes
    assert len(rk.plans) == 2


def test_the_log_says_what_was_planned_and_why(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = pair()
    rk = wrap(model, torch.randn(6, 8))
    with caplog.at_level(logging.INFO, "rockmate"):
        rk(torch.randn(3, 8))
    assert "input 0 was float32[6, 8] on cpu and is float32[3, 8] on cpu" in caplog.text
    assert "resized in" in caplog.text
    assert len(rk.plans) == len(str(rk.plans).splitlines()) == 2


@pytest.mark.slow
def test_several_samples_are_planned_ahead() -> None:
    model, twin = pair()
    small, large = torch.randn(4, 8), torch.randn(64, 8)
    rk = wrap(model, small, 0.9, samples=[large, {"x": small, "scale": 3.0}])
    assert len(rk.plans) == 3
    alone = wrap(copy.deepcopy(twin), large, 0.9).budget_bytes
    assert rk.budget_bytes == pytest.approx(alone, rel=1e-3)  # one is measured, one predicted
    alike(rk, twin, large)
    alike(rk, twin, x=small, scale=3.0)
    assert len(rk.plans) == 3


def test_a_larger_batch_than_any_before_keeps_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU())])
    rk = wrap(model, torch.randn(64, 32), 1.0)
    large = torch.randn(96, 32)
    rk(large[:64]).sum().backward()

    def first_step(_span: Any) -> None:
        rk(large).sum().backward()

    peak = trace_memory(first_step, torch.device("cpu")).peak_bytes
    assert rk.plans[-1].peak_bytes <= rk.budget_bytes
    # Planning runs a plain step to compare with, and holds the gradients and bits of two.
    plain_bytes = wrap(copy.deepcopy(model), large, 1.0).eager_peak_bytes
    resident = sum(p.nbytes for p in model.parameters()) + large.nbytes
    assert peak <= max(rk.budget_bytes, plain_bytes or 0) + 4 * resident


# ---------------------------------------------------------------------- modes of torch


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_wrapping_where_no_gradients_are_recorded(mode: Any) -> None:
    model, twin = pair()
    with mode():
        rk = wrap(model, torch.randn(6, 8))
    alike(rk, twin, torch.randn(6, 8))
    assert len(rk.plans) == 1
    with torch.inference_mode():
        broken = Net()
    with pytest.raises(rockmate.UnsupportedModuleError, match=r"inference_mode"):
        wrap(broken, torch.randn(6, 8))


def test_another_default_type() -> None:
    model, twin = pair()
    x = torch.randn(6, 8)
    torch.set_default_dtype(torch.float64)
    try:
        rk = wrap(model, x)
        alike(rk, twin, x)
    finally:
        torch.set_default_dtype(torch.float32)
    alike(rk, twin, x)
    assert len(rk.plans) == 2


def test_plain_runs_the_original_for_gradients_of_gradients() -> None:
    model, twin = pair()
    x = torch.randn(6, 8, requires_grad=True)
    rk = wrap(model, x)
    found = []
    state = torch.get_rng_state()
    for module in (rk, twin):
        torch.set_rng_state(state)
        with rockmate.plain():
            y = module(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(slope)
    assert torch.equal(*found)
    assert_same_gradients(model, twin)


def test_transforms_run_the_original() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    rk = wrap(model, x)
    assert torch.equal(torch.func.vmap(rk)(x), torch.func.vmap(model)(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [True, False])
def test_gradient_checkpointing_is_the_plans_to_decide(
    before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers", reason="transformers is a test extra")
    torch.manual_seed(0)
    model = hugging_face_gpt2(layers=2, width=16, vocab=40, length=16)
    model.config.use_cache = False
    twin = copy.deepcopy(model)
    batch = {"input_ids": torch.randint(0, 40, (2, 8)), "labels": torch.randint(0, 40, (2, 8))}
    with caplog.at_level(logging.INFO, "rockmate"):
        if before:
            model.gradient_checkpointing_enable()
        rk = wrap(model, batch, "4MiB")
        if not before:
            rk.gradient_checkpointing_enable()
        for _ in range(2):
            state = torch.get_rng_state()
            losses = []
            for module in (rk, twin):
                torch.set_rng_state(state)
                losses.append(module(**batch).loss)
                losses[-1].backward()
            assert torch.equal(*losses)
    assert_same_gradients(model, twin)
    assert caplog.text.count("the plan decides") == 1


# ---------------------------------------------------------------------- anything at random


@contextlib.contextmanager
def region(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


CHANGES = {
    "shape": st.integers(2, 4),
    "flag": st.sampled_from(["", "body", "body.1", "body.3"]),
    "freeze": st.sampled_from(["head.weight", "body.0.weight", "body.1.bias"]),
    "scale": st.sampled_from([0.5, 2.0, 1, 0.3, 0.0, -1.5]),
    "temperature": st.sampled_from([1.0, 3.0]),
    "mask": st.booleans(),
    "wants": st.booleans(),
    "layer": st.integers(0, 1),
    "adapter": st.just(1),
    "loss": st.sampled_from(sorted(LOSSES)),
    "autocast": st.sampled_from([None, torch.bfloat16]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
}
ANY_CHANGE = st.sampled_from(sorted(CHANGES)).flatmap(
    lambda name: st.tuples(st.just(name), CHANGES[name])
)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ANY_CHANGE, min_size=3, max_size=8))
def test_any_one_thing_changed_between_steps(changes: list[tuple[str, Any]]) -> None:
    model, twin = pair()
    rk = wrap(model, torch.randn(3, 8), max_plans=3, self_test=False)
    call: dict[str, Any] = {"shape": 3, "dtype": torch.float32}
    for name, value in changes:
        call[name] = value
        for module in (rk, twin):
            if name == "flag":
                part = module.get_submodule(value)
                part.training = not part.training
            elif name == "freeze":
                if value not in dict(module.named_parameters()):  # it is inside an adapter by now
                    continue
                parameter = module.get_parameter(value)
                parameter.requires_grad = not parameter.requires_grad
            elif name == "temperature":
                module.temperature = value
            elif name == "layer":
                torch.manual_seed(value)
                module.head = nn.Linear(12, 4, bias=bool(value), dtype=call["dtype"])
            elif name == "adapter":
                torch.manual_seed(value)
                if type(module.head) is nn.Linear:
                    module.head = Adapter(module.head).to(call["dtype"])
            elif name == "dtype":
                module.to(value)
        x = torch.randn(call["shape"], 8, dtype=call["dtype"])
        x.requires_grad_(call.get("wants", False))
        kwargs: dict[str, Any] = {"scale": call["scale"]} if "scale" in call else {}
        if call.get("mask"):
            kwargs["mask"] = torch.arange(12) % 3 == 0
        mixed = call.get("autocast") if call["dtype"] == torch.float32 else None
        with region(mixed):
            alike(rk, twin, x, loss=call.get("loss", "square"), **kwargs)
