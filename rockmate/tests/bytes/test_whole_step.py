"""`memory=`: whole steps stay within it, the loss and the optimizer included."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

import rockmate
from fake_cuda.allocator import AllocatorRules
from fake_cuda.device import fake_cuda
from oracles.training import assert_same_gradients
from rkgb.device.cuda import Cuda
from rkgb.engine import device_of, trace_memory
from rockmate.whole_step.optimizers import optimizer_bytes
from rockmate.whole_step.outputs import CallBytes
from rockmate.whole_step.whole_step import WholeStep

HOST = torch.device("cpu")


class Mlp(nn.Sequential):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        layers = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        ]
        super().__init__(*layers)


class Net(nn.Module):
    """Convolutions with buffers, and a loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + nn.functional.relu(norm(conv(x)))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class Language(nn.Module):
    """A tied embedding, and the loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32)
        self.layers = nn.ModuleList(Mlp(32, 1) for _ in range(2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Any], Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(512, 64), lambda y: y.abs().square().mean()),
    "net": (
        Net,
        lambda: torch.randn(8, 8, 16, 16),
        lambda y: nn.functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.long)),
    ),
    "language": (Language, lambda: torch.randint(200, (8, 32)), lambda y: y[0]),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=True),
}


NOW = {("mlp", "adamw-foreach", "host"), ("net", "sgd", "host"), ("language", "adamw", "blocks")}
CELLS = [
    pytest.param(*cell, marks=() if cell in NOW else pytest.mark.nightly, id="-".join(cell))
    for cell in itertools.product(CASES, OPTIMIZERS, ("host", "blocks"))
]


@contextlib.contextmanager
def counting_as(rules: str) -> Iterator[None]:
    """Count as the CPU does, or in CUDA's blocks."""
    blocks = AllocatorRules.shrunk(64, expandable=True)
    with fake_cuda(blocks) if rules == "blocks" else contextlib.nullcontext():
        yield


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> int:
    """Return what is there between two steps, each tensor in blocks of its own."""
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [*model.parameters(), *model.buffers(), *gradients, *state, *inputs]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return sum(map(device_of(HOST).block_bytes, storages.values()))


def peaks_of_steps(
    rk: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    loss_of: Callable[[Any], Tensor],
    *,
    none: bool,
    micro_batches: int = 1,
) -> list[int]:
    """Return the most that is held in each of some whole steps, all things together."""

    def step(_span: Any = None) -> None:
        for _ in range(micro_batches):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "outputs of .* beside its loss")
                found = rk(x)
                loss = loss_of(found)
                del found
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)

    peaks = []
    for _ in range(3):
        before, trace = held_bytes(rk, optimizer, x), trace_memory(step, HOST)
        peaks.append(before + trace.peak_bytes)
    return peaks


def least_of(model: nn.Module, x: Tensor, optimizer: Any) -> int:
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(model, x, memory=1000, optimizer=optimizer, cost="flops")
    return refused.value.minimum_bytes


@pytest.mark.parametrize(("case", "optimizer", "rules"), CELLS)
def test_whole_steps_stay_within_the_least_memory(case: str, optimizer: str, rules: str) -> None:
    make, sample, loss_of = CASES[case]
    torch.manual_seed(0)
    model, x = make(), sample()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    with counting_as(rules):
        least = least_of(model, x, stepper)
        rk = rockmate.Rockmate(model, x, memory=least, optimizer=stepper, cost="flops")
        assert rk.memory.asked_bytes == least
        for none in (True, False):
            micro_batches = 1 if none else 2
            peaks = peaks_of_steps(rk, stepper, x, loss_of, none=none, micro_batches=micro_batches)
            assert max(peaks) <= least


def test_memory_is_used_where_activations_could_use_it() -> None:
    torch.manual_seed(0)
    model, x = Language(), torch.randint(200, (16, 64))
    stepper = torch.optim.AdamW(model.parameters())
    memory = least_of(model, x, stepper) * 11 // 10
    rk = rockmate.Rockmate(model, x, memory=memory, optimizer=stepper, cost="flops")
    peaks = peaks_of_steps(rk, stepper, x, lambda y: y[0], none=False)
    assert 0.98 * memory <= max(peaks) <= memory


@pytest.mark.parametrize("rules", ["host", pytest.param("blocks", marks=pytest.mark.nightly)])
def test_activations_use_the_room_of_gradients_until_they_come(rules: str) -> None:
    torch.manual_seed(0)
    model, x, loss = Mlp(128, 4), torch.randn(256, 128), lambda y: y.abs().square().mean()
    twin = copy.deepcopy(model)
    stepper = torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops", "loss": loss}
    with counting_as(rules):
        with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
            rockmate.Rockmate(model, x, memory=1000, **how)
        memory = refused.value.minimum_bytes
        rk = rockmate.Rockmate(model, x, memory=memory, **how)
        gradients = sum(p.nbytes for p in model.parameters())
        there = rockmate.Rockmate(
            *(model, x, rk.budget_bytes - gradients), cost="flops", loss=loss, planner="auto"
        )
        assert rk.plan.overhead < there.plan.overhead / 2
        assert "then, gradients" in str(rk.memory)
        assert rk.memory.budget_bytes == rk.budget_bytes
        peaks = peaks_of_steps(rk, stepper, x, lambda y: y[0], none=True)
        assert 0.98 * memory <= max(peaks) <= memory
        # Micro-batches after the first find gradients, and so do steps after zero_grad(False).
        for none in (True, False):
            more = peaks_of_steps(rk, stepper, x, lambda y: y[0], none=none, micro_batches=3)
            assert max(more) <= memory
    for found in (rk, twin):
        found.load_state_dict(twin.state_dict())
        found.zero_grad()
        for _ in range(2):
            (found(x)[0] if found is rk else loss(found(x))).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("rules", ["host", "blocks"])
def test_an_average_beside_the_optimizer_is_within_the_memory(rules: str) -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(512, 64)
    stepper = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    with counting_as(rules):
        within = [least_of(model, x, one) for one in (stepper, [stepper, average])]
        kept = held_bytes(average, torch.optim.SGD(average.parameters()))
        assert within[1] - within[0] == kept
        rk = rockmate.Rockmate(model, x, memory=within[1], optimizer=[stepper, average])
        assert {p.name: p.size_bytes for p in rk.memory.parts}["copies of weights"] == kept

        def step(_span: Any) -> None:
            rk(x).square().mean().backward()
            stepper.step()
            average.update_parameters(rk)
            stepper.zero_grad()

        for _ in range(2):
            before = kept + held_bytes(rk, stepper, x)
            assert before + trace_memory(step, HOST).peak_bytes <= within[1]
    loaded = pickle.loads(pickle.dumps(rk))
    loaded(x)
    assert loaded.memory.parts[3:] == rk.memory.parts[3:], "copies know of it"


def test_steps_are_those_of_plain_training() -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    stepper = torch.optim.AdamW(model.parameters())
    memory = least_of(model, x, stepper)
    assert stepper.state == {}
    assert all(p.grad is None for p in model.parameters())
    rk = rockmate.Rockmate(model, x, memory=memory, optimizer=stepper, cost="flops")
    rk(x).sum().backward()
    twin(x).sum().backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_temporaries_are_what_a_real_step_takes(name: str) -> None:
    model = Mlp()
    stepper = OPTIMIZERS[name](model.parameters())
    parameters = list(model.parameters())
    found = optimizer_bytes(stepper, parameters, HOST)
    peaks = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        before = held_bytes(model, stepper)
        peaks.append(before + trace_memory(lambda _: stepper.step(), HOST).peak_bytes)
    there = held_bytes(model, stepper)
    stepper.state.clear()
    assert found.state_bytes == there - held_bytes(model, stepper)
    assert max(peaks) <= there + found.temporary_bytes <= max(peaks) + 4096


def test_the_table_says_what_is_to_come_and_what_is_there(tmp_path: Path) -> None:
    model, x = Mlp(), torch.randn(256, 64)
    stepper = torch.optim.AdamW(model.parameters())
    memory = least_of(model, x, stepper)
    rk = rockmate.Rockmate(model, x, memory=memory, optimizer=stepper, cost="flops")
    before = rk.memory
    assert "state of AdamW, to come" in str(before)
    assert before.budget_bytes == rk.budget_bytes
    assert before.resident_bytes + before.budget_bytes == memory
    peaks_of_steps(rk, stepper, x, lambda y: y.square().mean(), none=True)
    after = rk.memory
    assert "to come" not in str(after)
    rest = [{p.name: p.size_bytes for p in one.parts[:-1]} for one in (before, after)]
    assert list(rest[0].values()) == list(rest[1].values())
    assert [one.parts[-1].name.partition(",")[2] for one in (before, after)] == ["", " as seen"]
    page = after.html(tmp_path / "memory.html").read_text(encoding="utf-8")
    for part in after.parts:
        assert page.count(part.name) == 3, "in the bar, beside its colour, and in the table"
    shares = [float(share) for share in re.findall(r"flex:0 1 ([\d.]+)%", page)]
    assert sum(shares) == pytest.approx(100, abs=0.1)


def test_too_little_is_refused_with_the_table_and_the_least_that_does() -> None:
    model, x = Mlp(), torch.randn(256, 64)
    stepper = torch.optim.AdamW(model.parameters(), foreach=True)
    least = least_of(model, x, stepper)
    with pytest.raises(rockmate.InfeasibleBudgetError, match="too little") as refused:
        rockmate.Rockmate(model, x, memory=least - 1, optimizer=stepper, cost="flops")
    assert "state of AdamW, to come" in str(refused.value)
    assert refused.value.minimum_bytes == least
    rockmate.Rockmate(model, x, memory=least, optimizer=stepper, cost="flops")


def test_the_optimizer_is_refused_its_step_where_it_has_no_room() -> None:
    model, x = Mlp(256, 2), torch.randn(1, 256)  # its temporaries are more than activations
    stepper = torch.optim.AdamW(model.parameters(), foreach=True)
    least = least_of(model, x, stepper)
    rk = rockmate.Rockmate(model, x, memory=least, optimizer=stepper, cost="flops")
    assert rk.memory.stepping_bytes == rk.memory.budget_bytes
    assert max(peaks_of_steps(rk, stepper, x, lambda y: y.mean(), none=True)) <= least


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "needs a budget"),
        ({"budget": "1MB", "memory": "1MB", "optimizer": "sgd"}, "and got both"),
        ({"memory": "1MB"}, "needs the optimizer"),
        ({"budget": "1MB", "optimizer": "sgd"}, "only with memory="),
        ({"memory": "1MB", "optimizer": "adamx"}, "optimizer 'adamx' is unknown"),
        ({"memory": "1MB", "optimizer": 3}, "optimizer 'int' is unknown"),
        ({"memory": "60%", "optimizer": "sgd"}, "memory '60%' is a fraction"),
        ({"memory": "8 gigs", "optimizer": "sgd"}, "memory '8 gigs' has an unknown unit"),
    ],
)
def test_what_says_no_amount_is_refused(given: dict[str, Any], text: str) -> None:
    model, x = Mlp(), torch.randn(2, 64)
    for call in (rockmate.Rockmate, rockmate.apply, rockmate.apply_to_blocks):
        with pytest.raises((TypeError, rockmate.RockmateError), match=text):
            call(model, x, **given)


def test_another_batch_has_less_left_where_its_inputs_take_more() -> None:
    model, x = Mlp(), torch.randn(256, 64)
    memory = 4 * least_of(model, x, "sgd")
    rk = rockmate.Rockmate(model, x, memory=memory, optimizer="sgd", cost="flops")
    larger = torch.randn(512, 64)
    rk(larger).sum().backward()
    first, second = (row.budget_bytes for row in rk.plans)
    assert first - second == (larger.nbytes - x.nbytes) * 5  # the input, and four of a loss


GROWING: dict[str, Callable[[int], Tensor]] = {
    "mlp": lambda n: torch.randn(n, 64),
    "net": lambda n: torch.randn(n, 8, 16, 16),
    "language": lambda n: torch.randint(200, (n, 32)),
}
BATCHES = [
    pytest.param(*cell, marks=() if cell == ("mlp", "blocks") else pytest.mark.nightly)
    for cell in itertools.product(GROWING, ("host", "blocks"))
]


@pytest.mark.parametrize(("case", "rules"), BATCHES)
def test_the_largest_batch_trains_and_the_next_is_refused(case: str, rules: str) -> None:
    torch.manual_seed(0)
    (make, _, loss_of), sample = CASES[case], GROWING[case]
    model = make()
    stepper = torch.optim.AdamW(model.parameters())
    with counting_as(rules):
        memory = least_of(model, sample(16), stepper) * 21 // 20
        found = rockmate.largest_batch(model, sample, memory, optimizer=stepper, device="cpu")
        assert found.batch >= 16
        within: dict[str, Any] = {"memory": memory, "optimizer": stepper, "cost": "flops"}
        with pytest.raises(rockmate.InfeasibleBudgetError, match="too little for a whole step"):
            rockmate.Rockmate(model, sample(found.batch + 1), **within)
        x = sample(found.batch)
        rk = rockmate.Rockmate(model, x, **within)
        assert rk.budget_bytes >= found.budget_bytes  # more, until gradients come
        assert max(peaks_of_steps(rk, stepper, x, loss_of, none=False)) <= memory


WEIGHT = torch.linspace(0.5, 2.0, 64)


LABELS, VALUES = torch.arange(64) % 32, torch.rand(64, 32)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda y: F.cross_entropy(y, LABELS),
    "of shifted logits": lambda y: F.cross_entropy(y[:-1].float().contiguous(), LABELS[1:]),
    "of shares": lambda y: F.cross_entropy(y, VALUES, label_smoothing=0.1),
    "mse": lambda y: F.mse_loss(y, VALUES),
    "l1": lambda y: F.l1_loss(y, VALUES),
    "binary": lambda y: F.binary_cross_entropy_with_logits(y, VALUES, pos_weight=torch.ones(32)),
    "divergence": lambda y: F.kl_div(y.log_softmax(1), VALUES),
    "gaussian": lambda y: F.gaussian_nll_loss(y, VALUES, VALUES + 1),
    "by hand": lambda y: (y - VALUES).abs().square().mean(),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_outside_takes_no_more_than_is_left_to_it(name: str) -> None:
    model, x = nn.Linear(8, 32), torch.randn(64, 8)
    left = CallBytes.of(model, x, None, HOST).loss_bytes

    def step(_span: Any) -> None:
        y = torch.randn(64, 32).requires_grad_() * 1
        loss = LOSSES[name](y)
        del y
        loss.backward()

    # The output and its gradient are the module's.
    peak = trace_memory(step, HOST).peak_bytes
    assert peak - 2 * VALUES.nbytes <= left + VALUES.nbytes + 4096


def weighted(y: Tensor, target: Tensor, scale: float = 0.5) -> Tensor:
    return scale * ((y - target).square() * WEIGHT).mean()


@pytest.mark.parametrize("loss", [nn.MSELoss(), weighted], ids=["module", "function"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_loss_is_planned_with_the_module(loss: Any, by_name: bool) -> None:
    torch.manual_seed(0)
    model, x, target = Mlp(), torch.randn(256, 64), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    args, kwargs = ((x,), {"target": target}) if by_name else ((x, target), {})
    stepper = torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"optimizer": stepper, "cost": "flops", "loss": loss, "kwargs": kwargs}
    with pytest.raises(rockmate.InfeasibleBudgetError, match="too little") as refused:
        rockmate.Rockmate(model, args, memory=1000, **how)
    least = refused.value.minimum_bytes
    rk = rockmate.Rockmate(model, args, memory=least, **how)
    assert "loss outside" not in str(rk.memory)
    assert isinstance(rk, Mlp)
    found, expected = rk(*args, **kwargs)[0], loss(twin(x), target)
    found.backward()
    expected.backward()
    assert torch.equal(found, expected)
    assert_same_gradients(model, twin)
    for again in (copy.deepcopy(rk), pickle.loads(pickle.dumps(rk))):
        assert torch.equal(again(*args, **kwargs)[1], twin(x))
    held = held_bytes(model, stepper, x, target)
    peak = trace_memory(lambda _: rk(*args, **kwargs)[0].backward(), HOST).peak_bytes
    assert held + peak <= least
    assert torch.equal(rk.original(x), twin(x))


def test_a_loss_that_cannot_be_planned_is_refused() -> None:
    model, x = Mlp(), torch.randn(8, 64)
    loss = nn.MSELoss()
    for call in (rockmate.apply, rockmate.apply_to_blocks):
        with pytest.raises(rockmate.RockmateError, match="takes no loss="):
            call(model, (x, x), "1MB", loss=loss)
    with pytest.raises(rockmate.RockmateError, match="Linear has parameters to train"):
        rockmate.Rockmate(model, (x, x), "1MB", loss=nn.Linear(64, 1))
    rk = rockmate.Rockmate(model, (x, x), "1MB", loss=loss, cost="flops")
    with pytest.raises(TypeError, match=r"the loss takes \['target'\]"):
        rk()


def test_the_first_batch_is_planned_for_in_place() -> None:
    model, x = Mlp(), torch.randn(256, 64)
    stepper = torch.optim.AdamW(model.parameters())
    least = least_of(model, x, stepper)
    applied = rockmate.apply(model, memory=least, optimizer=stepper, cost="flops")
    assert applied is model
    assert isinstance(applied, rockmate.Rockmate)
    assert not hasattr(applied, "memory")
    model(x).mean().backward()
    assert applied.memory.asked_bytes == least
    with pytest.raises(rockmate.InfeasibleBudgetError, match="too little for a whole step"):
        model(torch.randn(2048, 64))


def test_the_device_has_what_the_step_may_take() -> None:
    model, x = Mlp(), torch.randn(256, 64)
    with fake_cuda(memory_bytes=20_000_000):
        rk = rockmate.Rockmate(model, x, memory="device", optimizer="sgd", cost="flops")
        held = held_bytes(model, torch.optim.SGD(model.parameters()), x)
        assert rk.memory.asked_bytes == 20_000_000 + held
    rk = rockmate.Rockmate(model, x, memory="device", optimizer="sgd", cost="flops")
    assert rk.memory.budget_bytes > 0


@pytest.mark.parametrize("others_hold_bytes", [0, 10**10])
def test_what_a_gpu_holds_beside_tensors_is_subtracted(
    monkeypatch: pytest.MonkeyPatch, others_hold_bytes: int
) -> None:
    context, reserved, allocated, total = 600_000_000, 3_000_000_000, 2_000_000_000, 24 * 10**9
    free = total - context - reserved - others_hold_bytes
    counters = {"memory_reserved": reserved, "memory_allocated": allocated}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    for name, size_bytes in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, size_bytes=size_bytes: size_bytes)
    monkeypatch.setattr(Cuda, "warm_up", lambda _: None)
    model, gpu = Mlp(), torch.device("cuda", 0)
    call = CallBytes(128_000, 128_000, 512_000)
    asked = WholeStep(10**10, "adamw").memory(model, call, device=gpu)
    parts = {part.name: part.size_bytes for part in asked.parts}
    assert parts["other tensors, workspaces"] == allocated, "the model is not there yet"
    # More than a context takes is others': it is not this step's.
    assert parts["context of CUDA"] == (1 << 30 if others_hold_bytes else context)
    assert parts["between blocks of the allocator"] == 10**10 // 50
    assert sum(parts.values()) + asked.budget_bytes == 10**10
    for budget in (10**8, 10**9):  # what is between blocks grows with the whole
        least = asked.least_bytes(budget)
        found = WholeStep(least, "adamw").memory(model, call, device=gpu)
        assert budget <= found.budget_bytes <= budget + 2

    whole = WholeStep(None, "adamw")
    there = whole.memory(model, call, device=gpu)
    assert there.asked_bytes == free + reserved, "what nobody else holds"
    again = whole.settled(there).memory(model, call, device=gpu)
    assert there.parts == again.parts
    assert all(part.name != "context of CUDA" for part in again.parts), "it is not in the memory"


def test_blocks_share_what_a_whole_step_leaves() -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(512, 64)
    stepper = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"cost": "flops", "compare": False, "optimizer": stepper}
    with pytest.raises(rockmate.InfeasibleBudgetError, match="too little") as refused:
        rockmate.apply_to_blocks(model, x, memory=1000, **options)
    least = refused.value.minimum_bytes
    plan = rockmate.apply_to_blocks(model, x, memory=least, **options)
    assert plan.memory is not None
    assert plan.memory.asked_bytes == least
    peaks = peaks_of_steps(model, stepper, x, lambda y: y.abs().square().mean(), none=False)
    assert max(peaks) <= least


def test_copies_and_files_know_what_the_optimizer_takes() -> None:
    model, x = Mlp(), torch.randn(256, 64)
    stepper = torch.optim.AdamW(model.parameters())
    memory = least_of(model, x, stepper)
    rk = rockmate.Rockmate(model, x, memory=memory, optimizer=stepper, cost="flops")
    loaded = pickle.loads(pickle.dumps(rk))
    loaded(x)
    assert loaded.memory.parts == rk.memory.parts
    assert not any(isinstance(v, torch.optim.Optimizer) for v in vars(loaded._rockmate).values())


def test_a_model_keeps_what_it_calls_memory() -> None:
    class Remembers(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.Parameter(torch.zeros(3))

    model, x = Remembers(), torch.randn(8, 64)
    rk = rockmate.Rockmate(model, x, memory="1GB", optimizer="sgd", cost="flops")
    assert rk.memory is model._parameters["memory"]


@pytest.mark.parametrize("case", [pytest.param("mlp", marks=pytest.mark.nightly), "language"])
def test_gradients_that_go_as_they_come_are_not_counted(case: str) -> None:
    make, sample, loss_of = CASES[case]
    torch.manual_seed(0)
    model, x = make(), sample()
    counted = least_of(model, x, "adamw")
    parameters: list[Tensor] = list(model.parameters())
    steppers = {p: torch.optim.AdamW([p]) for p in parameters}

    def step_at_once(parameter: Tensor) -> None:
        steppers[parameter].step()
        steppers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    least = least_of(model, x, steppers)
    assert least < counted or case == "language"  # one weight is nearly all of it
    rk = rockmate.Rockmate(model, x, memory=least, optimizer=steppers, cost="flops")
    assert not any(stepper.state for stepper in steppers.values()), "planning has run no step"
    nothing = torch.optim.SGD(model.parameters(), lr=0.0)  # the loop's own: all is done by then
    for _ in range(2):
        states = [s for stepper in steppers.values() for s in stepper.state.values()]
        held = held_bytes(rk, nothing, x, *(t for s in states for t in s.values()))
        peak = trace_memory(lambda _: loss_of(rk(x)).backward(), HOST).peak_bytes
        assert held + peak <= least
    assert all(stepper.state for stepper in steppers.values())
