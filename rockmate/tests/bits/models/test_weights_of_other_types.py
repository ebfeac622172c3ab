"""Weights of types that libraries bring: what their memory means is in attributes, or elsewhere.

Quantised weights below low-rank adapters are what users train so (QLoRA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients, eager_copy
from rkgb import SideEffectError
from rockmate import Rockmate
from runs.planned import wrap

WIDTH = 64


class Quantised(nn.Parameter):
    """Whole numbers, and what they have to be multiplied by."""

    scale: Tensor
    first: bool

    def __new__(cls, data: Tensor) -> Quantised:
        scale = data.abs().amax(1, keepdim=True) / 127
        made: Quantised = cls._of((data / scale).round().to(torch.int8))
        made.scale, made.first = scale, True
        return made

    @classmethod
    def _of(cls, content: Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, content, False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantised:
        made: Quantised = self._of(self.detach().clone())
        made.scale, made.first = self.scale.clone(), self.first
        return made

    def values(self) -> Tensor:
        return self.float() * self.scale


class QuantisedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantised(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.values())


class Adapted(nn.Module):
    """Two layers that stay as they are, with small ones beside the first."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.a, self.b = make(), make()
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh() + self.up(self.down(x))
        return self.b(x).square().mean()


def assert_trains_alike(rk: Rockmate, twin: nn.Module, steps: int = 3) -> None:
    """Train both, and compare losses and gradients; parameters may not know how to be compared."""
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (rk, twin)
    ]
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        losses = [module(x) for module in (rk, twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert_same_gradients(rk, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("opaque", [(), ("a",)])
def test_attributes_of_a_weight_go_with_it(opaque: tuple[str, ...]) -> None:
    model = Adapted(QuantisedLinear)
    twin, weight = eager_copy(model), model.a.weight
    attributes = dict(vars(weight))
    rk = wrap(model, torch.randn(8, WIDTH), "1MiB", opaque=opaque)
    assert rk.plan.opaque == opaque
    assert_trains_alike(rk, twin)
    assert rk.a.weight is weight
    assert type(weight) is Quantised
    assert all(vars(weight)[name] is value for name, value in attributes.items())


class SetsAttributes(QuantisedLinear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.first = False
        return super().forward(x)


def test_what_a_forward_sets_on_a_weight_is_left_to_it_by_planning() -> None:
    model = Adapted(SetsAttributes)
    twin = eager_copy(model)
    rk = wrap(model, torch.randn(8, WIDTH), "1MiB")
    assert model.a.weight.first
    assert rk.plan.opaque == ("a", "b")
    assert_trains_alike(rk, twin)
    assert not model.a.weight.first
    with pytest.raises(SideEffectError, match=r"attribute 'first' .*\(parameter 'a.weight'\)"):
        wrap(Adapted(SetsAttributes), torch.randn(8, WIDTH), "1MiB", strict=True)


class Pair(Tensor):
    """A tensor whose content lies in another."""

    inner: Tensor

    def __new__(cls, inner: Tensor) -> Pair:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, _: Any, *__: Any) -> Pair:
        return Pair(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [a.inner if isinstance(a, Pair) else a for a in args]
        return Pair(func(*inner, **(kwargs or {})))


class Shells(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (Pair(x) * 2).inner
        return x * scale


def test_tensors_around_others_run_in_what_runs_whole() -> None:
    model = Adapted(Shells)
    rk, twin = wrap(model, torch.randn(8, WIDTH), "1MiB"), eager_copy(model)
    assert rk.plan.opaque == ("a", "b")
    assert_trains_alike(rk, twin)


def test_a_kernel_in_python_may_read_what_it_is_given() -> None:
    library = torch.library.Library("reading_kernels", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.ops.reading_kernels.doubled(x)
            return x * scale

    model = Adapted(Doubled)
    rk, twin = wrap(model, torch.randn(8, WIDTH), "1MiB"), eager_copy(model)
    assert not rk.plan.opaque
    assert_trains_alike(rk, twin)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("adapted", ["by hand", "by PEFT"])
def test_weights_of_bitsandbytes(bits: int, adapted: str) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is no test extra")

    def make() -> nn.Module:
        if bits == 8:
            return bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
        return bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")

    torch.manual_seed(0)
    model: Any = Adapted(make).to("cpu")  # which quantises them
    if adapted == "by PEFT":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["a", "b"], r=4, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    twin = eager_copy(model)
    assert_trains_alike(wrap(model, torch.randn(8, WIDTH), "1MiB"), twin)
