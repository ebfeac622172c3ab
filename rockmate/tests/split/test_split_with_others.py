"""`split=` with files, the cache, memory, estimates, other numbers: a cut graph is a graph."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate.networks.cutting as cutting
from rockmate import InfeasibleBudgetError, Rockmate, estimate, largest_batch
from rockmate.errors import ArgumentsError, PlanMismatchError, UnknownChoiceError
from zoo.heads import Head, words

CHEAP: dict[str, Any] = {"cost": "flops", "split": True}


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for many numbers of pieces take seconds."""
    monkeypatch.setattr(cutting, "COUNTS", (8,))


def head() -> nn.Module:
    torch.manual_seed(0)
    return Head().double()


def least(model: nn.Module, **settings: Any) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, words(), 1, **{**CHEAP, **settings})
    return error.value.minimum_bytes


def gradients(module: nn.Module, *inputs: Any) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    loss = module(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def no_search(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is planned anew")


@pytest.mark.parametrize("split", [True, "exact"])
def test_a_file_has_the_cut_and_serves_where_it_may(
    split: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pieces, bits, peak and extra time, without search; other promises are refused."""
    model, path = head(), tmp_path / "head.json"
    budget = least(model, split=split)
    rk = Rockmate(model, words(), budget, **{**CHEAP, "split": split})
    rk.save_plan(path)
    monkeypatch.setattr(cutting.Cutting, "chosen", no_search)
    again = Rockmate(head(), words(), budget, split=split, plan=path)
    assert again.plan.cut == rk.plan.cut != ()
    assert again.plan.peak_bytes == rk.plan.peak_bytes
    assert again.plan.overhead == rk.plan.overhead > 0
    assert all(map(torch.equal, gradients(again, *words()), gradients(rk, *words())))
    with pytest.raises(PlanMismatchError, match="pieces of rows in the file, split=False here"):
        Rockmate(head(), words(), budget, plan=path)
    if split is True:
        with pytest.raises(PlanMismatchError, match="split='exact' here"):
            Rockmate(head(), words(), budget, split="exact", plan=path)


def test_the_cache_keeps_what_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start plans nothing, and a start that allows no pieces finds another plan."""
    settings: dict[str, Any] = {**CHEAP, "cache": tmp_path}
    budget = least(head())
    first = Rockmate(head(), words(), budget, **settings)
    monkeypatch.setattr(cutting.Cutting, "chosen", no_search)
    again = Rockmate(head(), words(), budget, **settings)
    assert again.plan.cut == first.plan.cut
    assert again.plan.overhead == first.plan.overhead
    assert all(map(torch.equal, gradients(again, *words()), gradients(first, *words())))
    with pytest.raises(InfeasibleBudgetError):
        Rockmate(head(), words(), budget, **{**settings, "split": False})


@pytest.mark.parametrize("split", [True, "exact"])
def test_less_memory_does_for_a_whole_step_in_pieces(split: Any) -> None:
    """The smallest memory is that of whole steps with the pieces; it is held, and one less not."""
    model = head()
    asked: dict[str, Any] = {**CHEAP, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}

    def smallest(split: Any) -> int:
        with pytest.raises(InfeasibleBudgetError) as error:
            Rockmate(model, words(), memory=1, **{**asked, "split": split})
        return error.value.minimum_bytes

    needed = smallest(split)
    saved = least(model, split=False) - least(model, split=split)
    assert needed == smallest(False) - saved
    with pytest.raises(InfeasibleBudgetError):
        Rockmate(model, words(), memory=needed - 1, **{**asked, "split": split})
    rk = Rockmate(model, words(), memory=needed, **{**asked, "split": split})
    assert rk.plan.cut
    assert rk.plan.measured_peak_bytes is not None
    assert rk.plan.measured_peak_bytes <= rk.plan.budget_bytes


def test_gradients_to_come_leave_their_room_to_pieces() -> None:
    """What the backward allocates for them is not there in the forward: fewer pieces, or none."""
    model = head()
    whole, cut = least(model, split=False), least(model)
    room = sum(8 * p.numel() for p in model.parameters())
    assert cut < whole - room < whole
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plans = []
    for grads in (False, True):
        if grads:
            gradients(model, *words())
        rk = Rockmate(model, words(), memory=1 << 30, optimizer=optimizer, **CHEAP)
        beside = (1 << 30) - rk.memory.budget_bytes
        rk = Rockmate(model, words(), memory=beside + cut + 100, optimizer=optimizer, **CHEAP)
        plans.append(rk.plan)
        model.zero_grad(set_to_none=True)
    assert all(plan.cut for plan in plans)
    assert plans[0].overhead <= plans[1].overhead
    assert plans[0].budget_bytes >= plans[1].budget_bytes


class Scaled(Head):
    """A head whose logits are multiplied by a number of the call."""

    def forward(self, tokens: Tensor, targets: Tensor, by: float = 1.0) -> Tensor:
        logits = self.out(self.norm(self.words(tokens))).mul(by)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_another_number_is_met_with_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that pieces hold is recorded again, and nothing is planned anew."""
    torch.manual_seed(0)
    model = Scaled().double()
    theirs = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, (*words(), 1.0), 1, **CHEAP)
    rk = Rockmate(model, (*words(), 1.0), error.value.minimum_bytes, **CHEAP)
    assert rk.plan.cut
    monkeypatch.setattr(cutting.Cutting, "chosen", no_search)
    for by in (0.5, 1.0, -3.0):
        ours, exact = gradients(rk, *words(), by), gradients(theirs, *words(), by)
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_what_split_does_not_go_with() -> None:
    """Other words are refused by name, and what only a trial tells."""
    with pytest.raises(UnknownChoiceError):
        Rockmate(head(), words(), 1.0, split="rows")  # type: ignore[arg-type]
    with pytest.raises(ArgumentsError, match=r"split=True.* exclude each other"):
        Rockmate(head(), words(), 1.0, split=True, offload="host")
    with pytest.raises(ArgumentsError, match="is tried"):
        estimate(head(), words(), split="exact")


def test_an_estimate_knows_pieces() -> None:
    """Its smallest budget is a plan's, to the byte, and so is its extra time."""
    model = head()
    found = estimate(model, words(), split=True)
    budget = least(model)
    assert found.smallest_budget_bytes == budget
    assert found.at(budget).overhead == Rockmate(model, words(), budget, **CHEAP).plan.overhead > 0


def test_the_largest_batch_is_larger_in_pieces() -> None:
    """What is named trains within the memory."""
    model, optimizer = head(), torch.optim.SGD(head().parameters(), 0.1)

    def batch(rows: int) -> tuple[Tensor, ...]:
        return words(2, rows)

    whole, cut = (
        largest_batch(model, batch, "400kB", optimizer=optimizer, split=split, at_most=64)
        for split in (False, True)
    )
    assert 1 < whole.batch < cut.batch
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rk = Rockmate(model, batch(cut.batch), memory="400kB", optimizer=optimizer, **CHEAP)
    assert rk.plan.cut
