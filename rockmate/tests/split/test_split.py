"""`split=True`: pieces of rows where the budget asks for them, eager's values, honest bytes.

Eager PyTorch is the oracle. Pieces of rows are added up in another order than the whole, so that
values agree to some roundings of float64, and bits with another plan of the same pieces.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rockmate.networks.cutting as cutting
from rkgb.elements.tensor_info import same_values
from rkgb.rows import BitsOfPieces
from rockmate import InfeasibleBudgetError, Rockmate
from zoo.heads import ROWS, WIDTH, WORDS, Block, Head, words

CHEAP: dict[str, Any] = {"cost": "flops", "split": True}
WIDE_BYTES = 8 * ROWS * WORDS


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for many numbers of pieces take seconds."""
    monkeypatch.setattr(cutting, "COUNTS", (8,))


def made(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return model.double()


def steps(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Train for two steps; return losses, gradients of inputs and of parameters."""
    found: list[Tensor] = []
    for _ in range(2):
        given = [i.detach().clone().requires_grad_(i.requires_grad) for i in inputs]
        module.zero_grad(set_to_none=True)
        result = module(*given)
        (result if not result.shape else result.square().sum()).backward()
        found += [result.detach()]
        found += [g.grad for g in given if g.grad is not None]
        found += [p.grad for p in module.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return found


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Sums over pieces differ from sums over all rows by roundings."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13, equal_nan=True)


def smallest(model: nn.Module, inputs: Any, **settings: Any) -> int:
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, inputs, 1, **{**CHEAP, **settings})
    return error.value.minimum_bytes


def test_a_head_runs_below_its_logits() -> None:
    """What no plan can do with whole logits; the same bits under two budgets with its pieces."""
    model, inputs = made(Head()), words()
    theirs = copy.deepcopy(model)
    least = smallest(model, inputs)
    assert least < smallest(model, inputs, split=False) / 2
    rk = Rockmate(model, inputs, least, **CHEAP)
    (cut,) = rk.plan.cut[:1]
    assert "pieces of rows" in cut
    assert cut in str(rk.plan)
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= least < 2 * WIDE_BYTES
    assert 0 < rk.plan.overhead < 0.2, "no product runs again"
    assert rk.plan.status == "feasible"
    other = copy.deepcopy(model)
    again = Rockmate(other, inputs, least + 100, **CHEAP)
    assert again.plan.cut[0] == cut
    ours = steps(rk, inputs)
    assert all(map(torch.equal, ours, steps(again, inputs)))
    assert_near(ours, steps(theirs, inputs))


class Gated(nn.Module):
    """Two products of one input, each of which sees it in its own way, and their gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 16 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(16 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.norm(x)
        return h + self.down(functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("split", [True, "exact"])
def test_products_of_one_input_are_cut_together(split: Any) -> None:
    """None of the two wide values is there as a whole; in exact pieces gradients read them all."""
    torch.manual_seed(0)
    model, x = made(Gated()), torch.randn(8, 32, WIDTH, dtype=torch.float64)
    wide_bytes = 8 * 8 * 32 * 16 * WIDTH
    least = smallest(model, x, split=split)
    assert least < (1 if split is True else 4) * wide_bytes
    rk = Rockmate(copy.deepcopy(model), x, least, **{**CHEAP, "split": split})
    assert rk.plan.measured_peak_bytes <= least
    ours, theirs = steps(rk, (x,)), steps(model, (x,))
    assert_near(ours, theirs)
    assert split is True or all(map(torch.equal, ours, theirs))


def test_pieces_are_the_chunks_that_one_writes_by_hand() -> None:
    """Loss and gradients of a loop over rows in plain PyTorch, to a rounding of each sum."""
    model, (tokens, targets) = made(Head()), words()
    rk = Rockmate(model, (tokens, targets), smallest(model, (tokens, targets)), **CHEAP)
    assert "8 pieces of rows," in rk.plan.cut[0]
    rk(tokens, targets).backward()
    ours = [p.grad for p in model.parameters()]
    by_hand = copy.deepcopy(model)
    by_hand.zero_grad(set_to_none=True)
    hidden = by_hand.norm(by_hand.words(tokens)).flatten(0, 1)
    rows, named = hidden.detach().requires_grad_(), targets.flatten()
    loss, asked = torch.zeros((), dtype=torch.float64), (named != -100).sum()
    for x, y in zip(rows.split(len(rows) // 8), named.split(len(rows) // 8), strict=True):
        part = functional.cross_entropy(by_hand.out(x), y, reduction="sum") / asked
        part.backward()
        loss += part.detach()
    hidden.backward(rows.grad)
    torch.testing.assert_close(rk(tokens, targets).detach(), loss, rtol=1e-14, atol=0)
    for a, p in zip(ours, by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-13, atol=1e-15)


def test_exact_pieces_have_the_bits_of_eager() -> None:
    """Losses and gradients, below what no plan of wholes can do, and above what sums would take."""
    model, inputs = made(Head()), words()
    theirs = copy.deepcopy(model)
    least = smallest(model, inputs, split="exact")
    assert smallest(model, inputs) < least < smallest(model, inputs, split=False)
    rk = Rockmate(model, inputs, least, **{**CHEAP, "split": "exact"})
    assert "pieces of rows" in rk.plan.cut[0]
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= least
    assert all(map(torch.equal, steps(rk, inputs), steps(theirs, inputs)))


@pytest.mark.parametrize("split", ["exact", True])
def test_a_dropout_in_a_chain_draws_what_eager_draws(split: bool | str) -> None:
    """Its mask is drawn for all rows at once, between operations that run by rows."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.drop = nn.Linear(16, WORDS), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(functional.gelu(self.head(x)))
            return functional.cross_entropy(y, torch.arange(len(y)) % WORDS)

    model = made(Dropping())
    inputs = (torch.randn(ROWS, 16, dtype=torch.float64, requires_grad=True),)
    theirs, found = copy.deepcopy(model), []
    least = smallest(model, inputs, split=split)
    assert least < 0.9 * smallest(model, inputs, split=False)
    rk = Rockmate(model, inputs, least, **{**CHEAP, "split": split})
    assert "+mul+" in rk.plan.cut[0], "the dropout is in the chain"
    for module in (rk, theirs):
        torch.manual_seed(7)
        found.append([*steps(module, inputs), torch.get_rng_state()])
    assert torch.equal(found[0].pop(), found[1].pop())
    if split == "exact":
        assert all(map(torch.equal, *found))
    else:
        assert_near(*found)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_a_loss_are_made_along_with_it(reduction: str) -> None:
    """They are scaled by what arrives, once for each backward; no product runs twice."""

    model, inputs = made(Head(reduction=reduction)), words()
    theirs, products = copy.deepcopy(model), []
    rk = Rockmate(model, inputs, smallest(model, inputs), **CHEAP)
    assert "each with its gradients" in rk.plan.cut[0]
    for module in (rk, theirs):
        with FlopCounterMode(display=False) as counter:
            for scale in (1.0, -0.3, 1e4):
                (scale * module(*inputs)).backward()
        products.append(counter.get_total_flops())
    assert products[0] == products[1]
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-11, atol=1e-11)
    for module in (rk, theirs):  # twice through one graph
        module.zero_grad()
        loss = module(*inputs)
        loss.backward(retain_graph=True)
        (loss * 3.0).backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-11, atol=1e-13)
    for module in (rk, theirs):  # twice through what a checkpoint holds
        module.zero_grad()
        loss = checkpoint(module, *inputs, use_reentrant=False)
        for scale in (3.0, 1.0):
            (loss * scale).backward(retain_graph=True)
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-11, atol=1e-13)


def test_what_would_round_otherwise_in_pieces_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation whose bits depend on how many rows it gets: tried, and left whole."""
    model, inputs = made(Head()), words()
    theirs = copy.deepcopy(model)
    monkeypatch.setattr(BitsOfPieces, "__call__", lambda *_: False)
    least = smallest(model, inputs, split="exact")
    assert least == smallest(model, inputs, split=False)
    rk = Rockmate(model, inputs, least, **{**CHEAP, "split": "exact"})
    assert not rk.plan.cut
    assert all(map(torch.equal, steps(rk, inputs), steps(theirs, inputs)))


HEADS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "plain": ({}, (2, 16)),
    "tied": ({"tied": True}, (2, 16)),
    "rows that nothing divides": ({}, (1, 124)),
    "three times such rows": ({}, (3, 31)),
    "label smoothing": ({"label_smoothing": 0.1}, (2, 16)),
    "weights per class": ({"weight": torch.linspace(0.5, 2, WORDS).double()}, (2, 16)),
    "an ignored class": ({"ignore_index": 7}, (2, 16)),
    "a sum": ({"reduction": "sum"}, (1, 124)),
    "a loss for each row": ({"reduction": "none"}, (1, 124)),
}
# Kernels give 11 and 9 of 31 rows other bits.
WAYS = [(kind, split) for kind in HEADS for split in ("exact", True)]
WAYS.remove(("three times such rows", "exact"))


@pytest.mark.parametrize(("kind", "split"), WAYS)
def test_a_head_trains_as_in_eager(kind: str, split: bool | str) -> None:
    """In pieces of rows; with targets that are ignored, some of them and all of them."""
    options, shape = HEADS[kind]
    model, (tokens, targets) = made(Head(**options)), words(*shape)
    theirs, ignored = copy.deepcopy(model), options.get("ignore_index", -100)
    targets[targets == -100] = ignored
    least = smallest(model, (tokens, targets), split=split)
    rk = Rockmate(model, (tokens, targets), least, **{**CHEAP, "split": split})
    assert "pieces of rows" in rk.plan.cut[0]
    assert ("with fewer" in rk.plan.cut[0]) == (shape[1] % 8 > 0)
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= least
    for inputs in ((tokens, targets), (tokens, torch.full_like(targets, ignored))):
        ours, expected = steps(rk, inputs), steps(theirs, inputs)
        if split == "exact":
            assert all(map(same_values, ours, expected))
        else:
            assert_near(ours, expected)


@pytest.mark.parametrize("split", ["exact", True])
@pytest.mark.parametrize("shape", [(1, 1), (0, 16), (2, 0)])
def test_a_head_with_one_row_or_none_runs_whole(shape: tuple[int, int], split: bool | str) -> None:
    """Nothing can be cut, and values are eager's, also those of a mean over nothing."""
    model, inputs = made(Head()), words(*shape)
    theirs = copy.deepcopy(model)
    least = smallest(model, inputs, split=split)
    rk = Rockmate(model, inputs, least, **{**CHEAP, "split": split})
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= least
    assert all(map(same_values, steps(rk, inputs), steps(theirs, inputs)))


@pytest.mark.parametrize("split", ["exact", True])
@pytest.mark.parametrize("asked", ["input", "input, not weights", "weights"])
def test_gradients_that_are_not_asked_for_are_not_made(asked: str, split: bool | str) -> None:
    """Of hidden states that come as an input, and of frozen weights."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, WORDS).requires_grad_("not weights" not in asked)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(self.out(x), targets)

    model = made(Loss())
    x = torch.randn(124, WIDTH, dtype=torch.float64, requires_grad="input" in asked)
    inputs, theirs = (x, torch.arange(124)), copy.deepcopy(model)
    least = smallest(model, inputs, split=split)
    rk = Rockmate(model, inputs, least, **{**CHEAP, "split": split})
    assert rk.plan.cut
    found = []
    for module in (rk, theirs):
        with FlopCounterMode(display=False) as counter:
            found.append(steps(module, inputs))
        found[-1].append(torch.tensor(counter.get_total_flops()))
    if split == "exact":
        found[0].pop(), found[1].pop()  # its forward runs again, piece by piece
        assert all(map(torch.equal, *found))
    else:
        assert_near(*found)


def test_blocks_of_linear_layers_are_cut() -> None:
    """Gradients of inputs and weights are eager's; what is not asked for is not made."""
    model = made(nn.Sequential(Block(), Block()))
    model[0].up.weight.requires_grad_(False)
    theirs = copy.deepcopy(model)
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64, requires_grad=True)
    rk = Rockmate(model, x, smallest(model, x), **CHEAP)
    assert rk.plan.cut
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= rk.plan.budget_bytes
    assert_near(steps(rk, (x,)), steps(theirs, (x,)))


def test_nothing_is_cut_where_everything_fits() -> None:
    """Then bits are eager's."""
    model = made(Head())
    theirs = copy.deepcopy(model)
    rk = Rockmate(model, words(), 1.0, **CHEAP)
    assert not rk.plan.cut
    assert all(map(torch.equal, steps(rk, words()), steps(theirs, words())))


def test_a_length_that_no_power_of_two_divides_is_cut() -> None:
    """28 rows in 14 pieces, where about 8 are asked for."""
    model, inputs = made(Head()), words(1, 28)
    theirs = copy.deepcopy(model)
    rk = Rockmate(model, inputs, smallest(model, inputs), **CHEAP)
    assert "14 pieces of rows," in rk.plan.cut[0]
    assert_near(steps(rk, inputs), steps(theirs, inputs))


def test_a_refusal_names_both_minima() -> None:
    """With pieces and without."""
    model, inputs = made(Head()), words()
    whole = smallest(model, inputs, split=False)
    with pytest.raises(InfeasibleBudgetError, match=rf"without, the smallest .* \({whole} bytes\)"):
        Rockmate(model, inputs, 1, **CHEAP)


class UnderAutocast(nn.Module):
    """Enters a region for each forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs)


class Drifting(Block):
    """A block whose forward reads a buffer that it then moves; no backward of eager reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(16 * WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.norm(x)) + self.offset
        result = x + self.down(functional.gelu(up))
        self.offset += 1.0
        return result


def test_what_the_forward_writes_to_is_not_read_again_in_pieces() -> None:
    """A backward that computes pieces again would find another offset."""
    model = made(Drifting())
    theirs = copy.deepcopy(model)
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    rk = Rockmate(model, x, smallest(model, x), self_test=False, **CHEAP)
    assert not any("add+" in cut for cut in rk.plan.cut), "no cut goes on behind the offset"
    assert_near(steps(rk, (x,)), steps(theirs, (x,)))


def test_convolutions_between_norms_of_the_batch_are_cut_by_images() -> None:
    """No run of rows goes through BatchNorm; what oneDNN allocates for a convolution is cut."""
    layers: list[nn.Module] = []
    for channels in (3, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    torch.manual_seed(0)
    model, images = nn.Sequential(*layers), torch.randn(8, 3, 32, 32)
    theirs = copy.deepcopy(model).double()
    least = smallest(model, images)
    assert least < 0.9 * smallest(model, images, split=False)
    rk = Rockmate(model, images, least, **CHEAP)
    assert "convolution" in str(rk.plan.cut[0])
    assert rk.plan.measured_peak_bytes == rk.plan.peak_bytes <= least
    for ours, exact in zip(steps(rk, (images,)), steps(theirs, (images.double(),)), strict=True):
        torch.testing.assert_close(
            ours.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max())
        )


class Both(Head):
    """The loss, and beside it the hidden states that it comes from."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        hidden = self.norm(self.words(tokens))
        logits = self.out(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def test_gradients_that_come_otherwise_than_planned() -> None:
    """A loss made of the loss and the logits that are returned beside it."""
    model, inputs = made(Both()), words()
    theirs = copy.deepcopy(model)
    rk = Rockmate(model, inputs, 180_000, **CHEAP)
    assert rk.plan.cut
    loss, logits = rk(*inputs)
    (loss + logits.square().mean()).backward()
    loss, logits = theirs(*inputs)
    (loss + logits.square().mean()).backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("split", [True, "exact"])
def test_a_head_under_autocast_is_cut(split: bool | str) -> None:
    """The weight's gradient is a sum in bfloat16, which is rounded once."""
    torch.manual_seed(0)
    model, inputs = Head(), words()
    theirs = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        least = smallest(model, inputs, split=split)
        assert least < smallest(model, inputs, split=False)
        rk = Rockmate(model, inputs, least, **{**CHEAP, "split": split})
    ours, expected = (steps(UnderAutocast(m), inputs) for m in (rk, theirs))
    if split == "exact":
        assert all(map(torch.equal, ours, expected))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


class Written(nn.Module):
    """A perceptron whose wide values are changed in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 128), nn.Linear(128, 8), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.how == "part":
            y[:, :4].mul_(2.0)
        elif self.how == "seen before":
            head = y[:, :4]
            y.mul_(2.0)
            y = y + head.sum(-1, keepdim=True)
        elif self.how == "dropout":
            y = functional.dropout(y, 0.3, inplace=True)
        elif self.how == "masked_fill_":
            y.masked_fill_(x.sum(-1, keepdim=True) > 0, 0.5)
        else:
            y = torch.relu_(y.add_(1.0).mul_(0.5))
        return self.down(y)


@pytest.mark.parametrize("how", ["relu_", "dropout", "masked_fill_", "part", "seen before"])
def test_what_a_chain_has_made_may_be_written_to(how: str) -> None:
    """A write becomes a new piece, but not one to a part, or one that an older name sees."""
    model = made(Written(how))
    theirs, x = copy.deepcopy(model), torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
    least, whole = smallest(model, x), smallest(model, x, split=False)
    rk = Rockmate(model, x, least, **CHEAP)
    is_cut = how not in ("part", "seen before")
    assert bool(rk.plan.cut) == (least < 0.9 * whole) == is_cut
    found = []
    for module in (rk, theirs):
        torch.manual_seed(7)
        found.append(steps(module, (x,)))
    assert_near(*found)


class _Shifted(nn.Module):
    """Few nodes with an empty batch, as many for another: the last are cut alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y + y.mean(-1, keepdim=True).expand_as(y)
        y = y + torch.rand(y.shape[-1])
        result: Tensor = self.last(y) + x
        return result


def test_an_empty_batch_after_steps_that_are_cut_alone() -> None:
    torch.manual_seed(0)
    model, sample = _Shifted(), torch.randn(80, 8, 4, 4)
    options: dict[str, Any] = {"planner": "segments", "cost": "flops", "split": "exact"}
    options |= {"self_test": False, "cache": False, "progress": False}
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(model, (sample,), 1, **options)
    planned = Rockmate(model, (sample,), refused.value.minimum_bytes, **options)
    assert planned.plan.cut
    planned(sample).square().mean().backward()
    assert planned(sample[:0]).shape == (0, 8, 4, 4)
