"""`Checkpointable` against a deepcopy twin that trains eagerly: equal bits."""

import copy
from collections import Counter, namedtuple

import pytest
import torch
from torch import nn

import rotor
from oracles.checkpointables import assert_trains_like, at_fraction, one_millisecond, peak_of
from rotor import Checkpointable, InfeasibleBudgetError, planning
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad
from rotor.solver.intervals import improve_with_intervals
from zoo.chains import Squashed, images, in_place_net, mlp, residual_net

CPU = torch.device("cpu")


# -- results --------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_training_is_bit_equal_with_dropout_batchnorm_and_in_place_relu(fraction):
    twin = residual_net()
    chk = Checkpointable(copy.deepcopy(twin), images(1)[0], timer=one_millisecond)
    at_fraction(chk, fraction)
    recomputed = chk.schedule.forward_count - len(chk.chain)
    assert (recomputed == 0) == (fraction == 1.0)
    assert_trains_like(chk, twin, images())


@pytest.mark.parametrize("strategy", ["none", "chen", "revolve", "recompute_all"])
def test_every_strategy_executes_and_is_bit_equal(strategy):
    twin = residual_net(4)
    chk = Checkpointable(copy.deepcopy(twin), images(1)[0], timer=one_millisecond)
    arguments = {"chen": {"segments": 3}, "revolve": {"checkpoints": 1}}.get(strategy, {})
    chk.compute_sequence(strategy=strategy, **arguments)
    assert_trains_like(chk, twin, images(2))


def test_a_deep_network_at_its_least_memory():
    twin = mlp(12)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(16, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, [torch.randn(16, 32) for _ in range(3)])


def forgetful_schedule(count):
    """Each second of three stages forgets its input, which the first makes again in backward."""
    forward, backward = [], []
    for k in range(count):
        position = k % 3
        whole = k - position + 2 < count
        if whole and position == 0:
            forward.append(ForwardCheckpoint(k))
            backward.append([Backward(k)])
        elif whole and position == 1:
            forward.append(ForwardEnableGrad(k, forget_input=True))
            backward.append([ForwardEnableGrad(k - 1), Backward(k)])
        else:
            forward.append(ForwardEnableGrad(k))
            backward.append([Backward(k)])
    return forward + [op for group in reversed(backward) for op in group]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: residual_net(6), (6, 3, 16, 16)),
        (lambda: in_place_net(6), (6, 3, 16, 16)),
        (lambda: mlp(6, 64), (256, 64)),
    ],
)
def test_recorded_stages_may_forget_their_input(make, shape):
    twin = make()
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(*shape), timer=one_millisecond)
    ops = forgetful_schedule(len(chk.chain))
    assert any("Fe*" in str(op) for op in ops)
    chk.use_schedule(rotor.Schedule.from_ops(chk.chain, ops, "by hand"))
    assert_trains_like(chk, twin, [torch.randn(*shape) for _ in range(3)])
    chk.zero_grad(set_to_none=False)
    x = torch.randn(*shape)
    loss_bytes = 2 * chk(x).nbytes
    peak = peak_of(lambda: chk(x).square().mean().backward(), CPU)
    assert peak <= chk.get_expected_memory() + loss_bytes
    # The input is really gone in between: kept, the prediction would be exceeded.
    keeping = [
        ForwardEnableGrad(op.stage) if isinstance(op, ForwardEnableGrad) else op for op in ops
    ]
    with pytest.raises(rotor.InvalidScheduleError, match="already held"):
        rotor.simulate(chk.chain, keeping)


@pytest.mark.slow
def test_tight_limits_are_met_by_retention_intervals_when_installed(monkeypatch):
    pytest.importorskip("ortools", reason="the extra 'intervals' is not installed")
    monkeypatch.setattr(planning, "improve_with_intervals", improve_with_intervals)  # as users do
    twin = mlp(4, 64, dropout=0.2)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(256, 64), timer=one_millisecond)
    least = rotor.solve_table(chk.chain, 1).smallest_feasible_bytes + chk.held_bytes
    methods = set()
    for percent in (90, 102, 126):
        limit = least * percent // 100
        try:
            recurrence = chk.compute_sequence(limit, intervals=False).makespan_ms
        except InfeasibleBudgetError:
            recurrence = float("inf")
        try:
            chk.compute_sequence(limit)
        except InfeasibleBudgetError:
            assert recurrence == float("inf")
            continue
        assert chk.get_expected_makespan() <= recurrence
        assert chk.get_expected_memory() <= limit
        methods.add(chk.schedule.method)
        if chk.schedule.method == "retention intervals":
            assert_trains_like(chk, copy.deepcopy(chk._sequential), [torch.randn(256, 64)])
    assert "retention intervals" in methods


def test_forward_counts_are_those_of_the_schedule():
    net = mlp(5, dropout=0.0)
    chk = Checkpointable(net, torch.randn(8, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    calls = Counter()
    for module in net:
        module.register_forward_hook(lambda m, *_: calls.update([m]))
    chk(torch.randn(8, 32)).sum().backward()
    stages = [op.stage for op in chk.schedule.ops if not isinstance(op, Backward)]
    expected = Counter()
    for stage in stages:
        run = chk._plans[chk._current].measurement.stages[stage]
        expected.update(run.code.modules)
    assert calls == expected
    assert max(calls.values()) > 1


def test_gradients_accumulate_over_steps_and_two_live_graphs():
    twin = residual_net(3)
    chk = Checkpointable(copy.deepcopy(twin), images(1)[0], timer=one_millisecond)
    at_fraction(chk, 0.2)
    first, second = images(2)
    start = torch.get_rng_state()
    for module in (chk, twin):
        torch.set_rng_state(start)
        one, two = module(first), module(second)
        (one.sum() + 2 * two.sum()).backward()
    for mine, theirs in zip(chk.parameters(), twin.parameters(), strict=True):
        # The two steps meet in autograd's order, which is the same here; equality is exact.
        assert torch.equal(mine.grad, theirs.grad)


class Split(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.left(x), self.right(x).relu()


class Mix(nn.Module):
    """A pair to a pair; the second passes through unchanged."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, pair):
        left, right = pair
        return self.drop(self.linear(left * right)), right


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


Pair = namedtuple("Pair", ["left", "right"])


class NamedPair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        left, right = pair
        return Pair(self.linear(left), right.sin())


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_tuples_between_stages_and_pass_through(fraction):
    twin = nn.Sequential(nn.Linear(24, 24), Split(24), *(Mix(24) for _ in range(5)), Join())
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(16, 24), timer=one_millisecond)
    at_fraction(chk, fraction)
    assert_trains_like(chk, twin, [torch.randn(16, 24) for _ in range(3)])


def test_tuple_input_and_named_tuple_output():
    twin = nn.Sequential(*(Mix(16) for _ in range(4)), NamedPair(16))
    sample = (torch.randn(8, 16), torch.randn(8, 16))
    chk = Checkpointable(copy.deepcopy(twin), sample, timer=one_millisecond)
    at_fraction(chk, 0.1)
    assert isinstance(chk(sample), Pair)
    assert_trains_like(chk, twin, [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(3)])


class Embed(nn.Sequential):
    pass


def test_integer_inputs_and_frozen_stages():
    twin = nn.Sequential(nn.Embedding(30, 16), *mlp(4, 16))
    for parameter in twin[0].parameters():
        parameter.requires_grad_(False)
    for parameter in twin[1].parameters():
        parameter.requires_grad_(False)
    chk = Checkpointable(copy.deepcopy(twin), torch.randint(0, 30, (8, 5)), timer=one_millisecond)
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, [torch.randint(0, 30, (8, 5)) for _ in range(3)])


def test_weights_shared_between_stages():
    shared = nn.Linear(16, 16)
    layers = [Squashed(shared), nn.Linear(16, 16), Squashed(shared), nn.Tanh(), Squashed(shared)]
    twin = nn.Sequential(*layers)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(8, 16), timer=one_millisecond)
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, [torch.randn(8, 16) for _ in range(3)])
    assert chk.held_bytes >= sum(p.nbytes for p in shared.parameters())


class AttentionBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class TiedHead(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return x @ self.embedding.weight.t()


@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_a_transformer_with_a_tied_embedding(fraction):
    embedding = nn.Embedding(40, 16)
    twin = nn.Sequential(
        embedding, *(AttentionBlock(16) for _ in range(4)), nn.LayerNorm(16), TiedHead(embedding)
    )
    tokens = [torch.randint(0, 40, (4, 12)) for _ in range(3)]
    chk = Checkpointable(copy.deepcopy(twin), tokens[0], timer=one_millisecond)
    at_fraction(chk, fraction)
    assert_trains_like(chk, twin, tokens)


def test_as_a_part_of_another_module():
    class Whole(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.stem, self.body, self.head = nn.Linear(8, 32), body, nn.Linear(32, 3)

        def forward(self, x):
            return self.head(self.body(self.stem(x).relu()))

    body = mlp(5)
    chk = Checkpointable(copy.deepcopy(body), torch.randn(4, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    whole = Whole(chk)
    twin = copy.deepcopy(whole)
    twin.body = body
    assert list(whole.state_dict()) == list(twin.state_dict())
    assert_trains_like(whole, twin, [torch.randn(4, 8) for _ in range(3)])
    whole.eval()
    assert not any(module.training for module in chk._sequential.modules())


class Counting(nn.Module):
    """A buffer whose value is used, and changes with every forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.ones(()))
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        y = torch.sin(x * self.weight * self.step.clone())
        self.step += 1
        return y


def test_buffers_are_updated_once_and_recomputation_sees_the_old_values():
    twin = nn.Sequential(*(m for _ in range(5) for m in (Counting(), nn.Linear(16, 16))))
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(8, 16), timer=one_millisecond)
    assert all(module.step == 1 for module in chk if isinstance(module, Counting))
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, [torch.randn(8, 16) for _ in range(3)])


def test_cumulative_batchnorm_is_exact():
    twin = residual_net(4)
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # cumulative averages depend on the count of batches
    chk = Checkpointable(copy.deepcopy(twin), images(1)[0], timer=one_millisecond)
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, images())


def test_kernels_that_differ_without_grad():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    twin = nn.Sequential(Recurrent(), nn.Linear(16, 16), nn.Tanh(), Recurrent(), nn.Linear(16, 4))
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(3, 6, 16), timer=one_millisecond)
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, [torch.randn(3, 6, 16) for _ in range(2)])


def test_autocast_is_the_same_in_recomputation():
    twin = mlp(6)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(16, 32), timer=one_millisecond)
    at_fraction(chk, 0.3)
    x = torch.randn(16, 32)
    start = torch.get_rng_state()
    outputs = []
    for module in (chk, twin):
        torch.set_rng_state(start)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(module(x))
        outputs[-1].float().sum().backward()
    assert chk.schedule.forward_count > len(chk.chain)
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)
    for mine, theirs in zip(chk.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_flags_changed_before_backward_do_not_reach_the_recomputation():
    twin = residual_net(3)
    chk = Checkpointable(copy.deepcopy(twin), images(1)[0], timer=one_millisecond)
    at_fraction(chk, 0.0)
    x = images(1)[0]
    start = torch.get_rng_state()
    for module in (chk, twin):
        torch.set_rng_state(start)
        loss = module(x).sum()
        module.eval()
        loss.backward()
        assert not any(m.training for m in module.modules())
    for mine, theirs in zip(chk.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_without_preserved_random_state_the_masks_differ():
    net = mlp(6, dropout=0.5)
    twin = copy.deepcopy(net)
    chk = Checkpointable(net, torch.randn(16, 32), timer=one_millisecond, preserve_rng_state=False)
    at_fraction(chk, 0.0)
    x = torch.randn(16, 32)
    start = torch.get_rng_state()
    for module in (chk, twin):
        torch.set_rng_state(start)
        module(x).sum().backward()
    pairs = zip(chk.parameters(), twin.parameters(), strict=True)
    assert any(not torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
