"""Training through Rockmate is training without it, bit for bit, inside the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oracles.training import (
    assert_same_gradients,
    assert_trains_like,
    eager_copy,
    measured_peak_bytes,
)
from rockmate import InfeasibleBudgetError, Rockmate
from runs.planned import wrap
from zoo.nets import hugging_face_gpt2, network, tokens

NETS = [
    "gpt", "resnet", "unet", "transformer", "mixer", "lstm", "tied", "fno", "uno", "hf_gpt2",
    "hf_llama",
]  # fmt: skip
FRACTIONS = [
    pytest.param(0.4, marks=pytest.mark.nightly),
    0.6,
    pytest.param(0.8, marks=pytest.mark.nightly),
    1.0,
]


def build(name: str) -> tuple[nn.Module, object]:
    if not name.startswith("hf_"):
        return network(name)
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra")
    ids, _ = tokens(3, 24, 90)
    if name == "hf_gpt2":
        model = hugging_face_gpt2()
    else:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=90, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    return model.train(), {"input_ids": ids, "labels": ids}


def wrap_or_smallest(model: nn.Module, sample: object, fraction: float) -> Rockmate:
    """Wrap at the budget, or hold the refusal to its word and wrap at the smallest it names."""
    try:
        return wrap(model, sample, fraction)
    except InfeasibleBudgetError as error:
        refusal = error
    smallest = refusal.minimum_bytes
    assert smallest > refusal.asked_bytes
    with pytest.raises(InfeasibleBudgetError) as again:
        wrap(model, sample, smallest - 1)
    assert again.value.minimum_bytes == smallest
    return wrap(model, sample, smallest)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", NETS)
def test_trains_like_eager_within_the_budget(name: str, fraction: float) -> None:
    model, sample = build(name)
    twin = eager_copy(model)
    wrapped = wrap_or_smallest(model, sample, fraction)
    assert_trains_like(wrapped, twin, sample)
    budget = wrapped.budget_bytes
    for grads_exist in (False, True):
        assert measured_peak_bytes(wrapped, sample, grads_exist=grads_exist) <= budget


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_planning_leaves_the_module_alone(name: str) -> None:
    model, sample = build(name)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    stream = torch.get_rng_state()
    fired = []
    first = next(model.parameters())
    first.register_hook(lambda grad: fired.append("tensor"))
    first.register_post_accumulate_grad_hook(lambda p: fired.append("accumulate"))
    wrap(model, sample, 1.0)
    assert torch.equal(torch.get_rng_state(), stream)
    assert fired == []
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(bool((p.grad == 0.5).all()) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_gradients_accumulate_and_hooks_fire_as_often_as_in_eager() -> None:
    model, sample = build("gpt")
    twin = eager_copy(model)
    wrapped = wrap(model, sample, 0.6)
    counts: list[list[int]] = []
    state = torch.get_rng_state()
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        fired = [0, 0]
        for parameter in module.parameters():
            parameter.register_hook(lambda grad, fired=fired: fired.__setitem__(0, fired[0] + 1))
            parameter.register_post_accumulate_grad_hook(
                lambda p, fired=fired: fired.__setitem__(1, fired[1] + 1)
            )
        for _ in range(3):
            module(*sample).backward()
        counts.append(fired)
    assert counts[0] == counts[1]
    assert_same_gradients(model, twin)


@pytest.mark.slow
def test_gradients_are_ready_during_backward_not_after() -> None:
    model, sample = build("gpt")
    wrapped = wrap(model, sample, 0.6)
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    wrapped(*sample).backward()
    assert order.index("blocks.2.mlp.0.weight") < order.index("blocks.0.mlp.0.weight")
    last = order.index("blocks.0.ln1.weight")
    assert order.index("ln.weight") < last, "the last layers' gradients must come first"


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Dropout(0.2))
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.body(x)
        return {"left": self.left(y), "nothing": None, "right": (self.right(y), y.detach())}


@pytest.mark.parametrize("heads", ["left", "right", "both"])
def test_backward_of_part_of_the_outputs(heads: str) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    twin = eager_copy(model)
    x = torch.randn(32, 16)
    wrapped = wrap_or_smallest(model, x, 0.8)
    state = torch.get_rng_state()
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        out = module(x)
        loss = torch.zeros(())
        if heads in ("left", "both"):
            loss = loss + out["left"].square().sum()
        if heads in ("right", "both"):
            loss = loss + out["right"][0].exp().sum()
        loss.backward()
    assert out["nothing"] is None
    assert not out["right"][1].requires_grad
    assert_same_gradients(model, twin)


@pytest.mark.slow
def test_two_forwards_then_two_backwards_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        model, sample = build("gpt")
        twin = eager_copy(model)
        wrapped = wrap(model, sample, 0.6)
        state = torch.get_rng_state()
        for module in (twin, wrapped):
            torch.set_rng_state(state)
            losses = [module(*sample), module(*sample)]
            for index in order:
                losses[index].backward()
        assert_same_gradients(model, twin)


def test_inputs_that_require_gradients_get_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.3))
    twin = eager_copy(model)
    base = torch.randn(8, 16)
    sample = base.clone().requires_grad_()
    wrapped = wrap(model, sample, 1 << 20)
    state = torch.get_rng_state()
    grads = []
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        x = base.clone().requires_grad_()
        y = torch.tanh(x) * 1.5  # not a leaf: its gradient flows on
        (module(y) * y).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.slow
def test_forward_without_backward_leaks_nothing() -> None:
    import gc
    import weakref

    model, sample = build("gpt")
    wrapped = wrap(model, sample, 0.6)
    loss = wrapped(*sample)
    node = weakref.ref(loss.grad_fn)
    step = weakref.ref(loss.grad_fn.step)
    del loss
    gc.collect()
    assert node() is None
    assert step() is None
