"""`split=` with `compile=True`: pieces of rows among compiled pieces, and compiled themselves.

Eager PyTorch is the oracle of values, the allocator that of bytes. Compiling is slow, so that the
networks are small.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate.networks.cutting as cutting
from rockmate import InfeasibleBudgetError, Rockmate
from zoo.heads import Head, Language, words

CHEAP: dict[str, Any] = {"cost": "flops", "compile": True}


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for many numbers of pieces take seconds."""
    monkeypatch.setattr(cutting, "COUNTS", (8,))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def least(model: nn.Module, **settings: Any) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, words(), 1, **CHEAP, **settings)
    return error.value.minimum_bytes


def gradients(module: nn.Module) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    loss = module(*words())
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Head, Language])
@pytest.mark.parametrize("split", [True, "exact"])
def test_pieces_of_rows_among_compiled_ones(kind: type[nn.Module], split: Any) -> None:
    """Below what compiled pieces need, to the byte: the same bits twice, and eager's values."""
    model = made(kind)
    exact = gradients(copy.deepcopy(model))
    whole, budget = least(model), least(model, split=split)
    assert budget < whole
    found = []
    for within in (budget, budget + 100):
        own = copy.deepcopy(model)
        rk = Rockmate(own, words(), within, split=split, **CHEAP)
        assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= within
        words_for_it = "8 compiled pieces of rows" if split is True else "8 pieces of rows"
        assert all(words_for_it in line for line in rk.plan.cut)
        assert rk.plan.compiled.compiled
        assert str(rk.plan).count("of eager (") == 1
        found.append(gradients(rk))
    assert all(map(torch.equal, *found))
    for ours, theirs in zip(found[0], exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    with pytest.raises(InfeasibleBudgetError, match=rf"without, the smallest .*\({whole} bytes"):
        Rockmate(model, words(), budget - 1, split=split, **CHEAP)


class WithLogits(Head):
    """A head that also returns its logits."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        logits = self.out(self.norm(self.words(tokens)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, logits


@pytest.mark.slow
def test_gradients_may_come_at_other_outputs() -> None:
    """The plan is for the loss alone, and other pieces are cut and compiled when others come."""
    model = made(WithLogits)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, words(), 1, split=True, **CHEAP)
    rk = Rockmate(copy.deepcopy(model), words(), 4 * error.value.minimum_bytes, split=True, **CHEAP)
    for share in (0.0, 1.0):
        found = []
        for module in (rk, model):
            module.zero_grad(set_to_none=True)
            loss, logits = module(*words())
            (loss + share * logits.square().mean()).backward()
            found.append([p.grad for p in module.parameters()])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
