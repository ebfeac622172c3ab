"""Models that return their loss beside other outputs: planned for gradients of the loss alone."""

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError, Rockmate, apply_to_blocks, estimate

WORDS, TOKENS = 512, 256


class Head(nn.Module):
    """A body, logits that are large beside it, and the loss made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(self.embed(ids)))
        return nn.functional.cross_entropy(logits, labels), logits


LOGITS_BYTES = TOKENS * WORDS * 4


def sample(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(WORDS, (2, TOKENS), generator=draw)
    return found[0], found[1]


def smallest(model: nn.Module) -> int:
    with pytest.raises(InfeasibleBudgetError) as refused:
        Rockmate(model, sample(), 1)
    return refused.value.minimum_bytes


def test_the_smallest_budget_is_that_of_the_loss_alone() -> None:
    """The backward of log_softmax: what it has made, the gradient of that, and its own result."""
    torch.manual_seed(0)
    model = Head()
    twin = copy.deepcopy(model)
    planned = Rockmate(model, sample(), smallest(model), cost="flops")
    assert 3 * LOGITS_BYTES <= planned.budget_bytes < 3.1 * LOGITS_BYTES
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    call = sample(1)

    def step(_: object) -> None:
        planned(*call)[0].backward()

    gc.collect()  # the refusal's frames hold a random state: freed in the step, it would count
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        peak = trace_memory(step, torch.device("cpu")).peak_bytes
    assert not told
    assert peak == planned.plan.peak_bytes <= planned.budget_bytes
    twin(*sample(1))[0].backward()
    assert_same_gradients(model, twin)
    kinds = planned._rockmate.first.executor.variants
    assert len(kinds) == 1, "what came had been foreseen"


def test_all_of_the_memory_is_what_a_training_loop_takes() -> None:
    torch.manual_seed(0)
    model = Head()
    planned = Rockmate(model, sample(), 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    call = sample(1)

    def step(_: object) -> None:
        model(*call)[0].backward()

    taken = trace_memory(step, torch.device("cpu")).peak_bytes
    assert taken == planned.eager_peak_bytes == planned.budget_bytes


def test_outputs_that_are_held_over_the_budget_are_told() -> None:
    model = Head()
    planned = Rockmate(model, sample(), smallest(model))
    outputs = planned(*sample(1))
    with pytest.warns(RuntimeWarning, match=r"beside its loss .* held .* more than the budget"):
        outputs[0].backward()
    outputs = planned(*sample(1))
    outputs[0].backward()  # told once

    roomy = Rockmate(copy.deepcopy(model), sample(), "1GiB")
    outputs = roomy(*sample(1))
    outputs[0].backward()


OTHERS: dict[str, Callable[[tuple[Tensor, Tensor]], Tensor]] = {
    "logits": lambda out: out[1].square().mean(),
    "a sum of logits": lambda out: out[1].sum(),
    "both": lambda out: out[0] + out[1].square().mean(),
    "the loss": lambda out: out[0] * 3,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("more_bytes", [0, 3 * LOGITS_BYTES])
def test_gradients_of_other_outputs_are_exact_and_within_the_budget(
    name: str, more_bytes: int
) -> None:
    torch.manual_seed(0)
    model = Head()
    twin = copy.deepcopy(model)
    planned = Rockmate(model, sample(), smallest(model) + more_bytes)
    call = sample(2)

    def step(_: object) -> None:
        out = planned(*call)
        loss = OTHERS[name](out)
        del out
        loss.backward()

    def outside(_: object) -> None:
        """Take what the loss that is made outside of the module takes, whatever the plan."""
        logits = torch.zeros(TOKENS, WORDS, requires_grad=True)
        OTHERS[name]((logits[0, 0], logits)).backward()

    needs = {"both": 2 * LOGITS_BYTES}.get(name, 0)
    if needs > more_bytes:  # gradients of the logits come from two sides
        with pytest.raises(InfeasibleBudgetError) as refused:
            step(None)
        assert refused.value.minimum_bytes > planned.budget_bytes
        return
    for _ in range(2):
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        step(None)
        OTHERS[name](twin(*call)).backward()
        assert_same_gradients(model, twin)
    more = trace_memory(outside, torch.device("cpu")).peak_bytes if name != "the loss" else 0
    assert trace_memory(step, torch.device("cpu")).peak_bytes <= planned.budget_bytes + more


class WithBalance(nn.Module):
    """A block that returns a loss of its own beside what goes on, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.layers(x)
        return y, y.square().mean()


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithBalance() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        extra = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            extra = extra + more
        return x.square().mean() + 0.01 * extra, x


def test_a_block_gets_gradients_at_all_that_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Balanced(), torch.randn(32, 16)
    twin = copy.deepcopy(model)
    apply_to_blocks(model, x, 0.9, compare=False)
    with caplog.at_level("INFO", logger="rockmate"):
        model(x)[0].backward()
    twin(x)[0].backward()
    assert_same_gradients(model, twin)
    assert "another backward" not in caplog.text


def test_an_estimate_takes_gradients_to_come_as_planning_does() -> None:
    model = Head()
    found = estimate(model, sample())
    planned = Rockmate(model, sample(), 1.0)
    assert planned.eager_peak_bytes is not None
    assert (
        abs(found.activations_bytes - planned.eager_peak_bytes) <= 0.02 * planned.eager_peak_bytes
    )


class Penalised(nn.Module):
    """Returns its result, and beside it a penalty on the weights that made it."""

    def __init__(self, penalty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.penalty = penalty

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), torch.stack([self.penalty(p) for p in self.parameters()]).sum()


@pytest.mark.parametrize("penalty", [lambda p: p.square().sum(), lambda p: p.exp().sum()])
def test_gradients_wait_for_uses_that_the_loss_does_not_reach(
    penalty: Callable[[Tensor], Tensor],
) -> None:
    """The penalty alone may be the loss, and autograd sums a gradient at its leaf's last use."""
    torch.manual_seed(0)
    model, x = Penalised(penalty), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    planned = Rockmate(model, x, "1MiB", cost="flops")
    assert planned.measured_peak_bytes == planned.plan.peak_bytes
    for parts in (slice(1, 2), slice(0, 2)):
        for net in (planned, twin):
            net.zero_grad()
            torch.stack([part.square().sum() for part in net(x)[parts]]).sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
