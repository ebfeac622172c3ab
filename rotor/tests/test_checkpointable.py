"""`Checkpointable` against a deepcopy twin that trains eagerly: equal bits, less memory."""

import copy
import io
import pickle
from collections import Counter, namedtuple

import pytest
import torch
from torch import nn

import rotor
from rotor import Checkpointable, InfeasibleBudgetError
from rotor.memory import peak_of
from rotor.ops import Backward, ForwardCheckpoint, ForwardEnableGrad
from rotor.testing import (
    ResidualBlock,
    assert_trains_like,
    mlp,
    one_millisecond,
    residual_net,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def least_limit(chk):
    with pytest.raises(InfeasibleBudgetError) as caught:
        chk.compute_sequence(1)
    return caught.value.minimum_bytes


def plain_peak(chk):
    chk.compute_sequence(10**12)
    return chk.get_expected_memory()


def at_fraction(chk, fraction):
    """Plan between the least memory (0) and that of a run without recomputation (1)."""
    least, most = least_limit(chk), plain_peak(chk)
    chk.compute_sequence(int(least + fraction * (most - least)))
    return chk.mem_limit


def images(count=3, batch=4):
    return [torch.randn(batch, 3, 12, 12) for _ in range(count)]


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
    [(lambda: residual_net(6), (6, 3, 16, 16)), (lambda: mlp(6, 64), (256, 64))],
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
    peak = peak_of(lambda: training_step(chk, x), CPU)
    assert peak <= chk.get_expected_memory() + loss_bytes
    # The input is really gone in between: kept, the prediction would be exceeded.
    keeping = [
        ForwardEnableGrad(op.stage) if isinstance(op, ForwardEnableGrad) else op for op in ops
    ]
    with pytest.raises(rotor.InvalidScheduleError, match="already held"):
        rotor.simulate(chk.chain, keeping)


def test_tight_limits_are_met_by_retention_intervals_when_installed():
    pytest.importorskip("ortools", reason="the extra 'intervals' is not installed")
    twin = mlp(4, 64, dropout=0.2)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(256, 64), timer=one_millisecond)
    least = rotor.solve_table(chk.chain, 1).smallest_feasible_bytes + chk.held_bytes
    for percent in range(90, 130, 4):
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
        if chk.schedule.method == "retention intervals":
            assert_trains_like(chk, copy.deepcopy(chk._sequential), [torch.randn(256, 64)])


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


class Wrapped(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x).tanh()


def test_weights_shared_between_stages():
    shared = nn.Linear(16, 16)
    layers = [Wrapped(shared), nn.Linear(16, 16), Wrapped(shared), nn.Tanh(), Wrapped(shared)]
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


# -- autograd ---------------------------------------------------------------------------------


def test_parameter_hooks_fire_once_and_post_accumulate_hooks_between_stages():
    net = mlp(4, dropout=0.0)
    chk = Checkpointable(net, torch.randn(8, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    events = []
    for name, parameter in chk.named_parameters():
        parameter.register_hook(lambda g, n=name: events.append(("hook", n)) or 2 * g)
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: events.append(("post", n)))
    x = torch.randn(8, 32)
    chk(x).sum().backward()
    counted = Counter(events)
    assert set(counted.values()) == {1}
    assert len(counted) == 2 * len(list(chk.parameters()))
    posts = [name for kind, name in events if kind == "post"]
    assert posts.index("9.weight") < posts.index("0.weight")
    twin = mlp(4, dropout=0.0)
    twin.load_state_dict(chk.state_dict())
    twin(x).sum().backward()
    for mine, theirs in zip(chk.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, 2 * theirs.grad)


def test_optimizer_step_inside_backward():
    nets = [mlp(5, dropout=0.0)]
    nets.append(copy.deepcopy(nets[0]))
    chk = Checkpointable(nets[0], torch.randn(8, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)

    def descend(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    x = torch.randn(8, 32)
    for module in (chk, nets[1]):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
        for _ in range(2):
            module(x).square().mean().backward()
    for mine, theirs in zip(chk.parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_second_backward_says_why_it_cannot_run():
    chk = Checkpointable(mlp(3), torch.randn(4, 32), 10**9, timer=one_millisecond)
    loss = chk(torch.randn(4, 32)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(rotor.BackwardError, match="already run"):
        loss.backward()


def test_parameters_changed_before_their_recomputation_are_noticed():
    chk = Checkpointable(mlp(4), torch.randn(4, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    loss = chk(torch.randn(4, 32)).sum()
    with torch.no_grad():
        chk[0].weight.add_(1.0)
    with pytest.raises(rotor.BackwardError, match="have been changed since its forward"):
        loss.backward()


def test_the_output_may_be_changed_in_place_as_eagerly():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Flatten())
    twin = copy.deepcopy(net)
    chk = Checkpointable(net, torch.randn(4, 8), 10**9, timer=one_millisecond)
    x = torch.randn(4, 8)
    for module in (chk, twin):
        output = module(x)
        output += 1
        output.square().sum().backward()
    assert torch.equal(chk[0].weight.grad, twin[0].weight.grad)


def test_gradients_of_some_parameters_only():
    net = mlp(4, dropout=0.0)
    twin = copy.deepcopy(net)
    chk = Checkpointable(net, torch.randn(8, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    x = torch.randn(8, 32)
    mine = torch.autograd.grad(chk(x).sum(), [chk[6].weight])
    theirs = torch.autograd.grad(twin(x).sum(), [twin[6].weight])
    assert torch.equal(mine[0], theirs[0])
    assert all(parameter.grad is None for parameter in chk.parameters())


# -- memory -----------------------------------------------------------------------------------


def training_step(module, x):
    loss = module(x).square().mean()
    loss.backward()


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: residual_net(8, 12), (6, 3, 24, 24)),
        (lambda: mlp(10, 64), (512, 64)),
    ],
)
def test_measured_peak_is_within_the_limit(make, shape, fraction):
    """Allocator events of a whole step, in both states of `.grad`; predictions are close."""
    chk = Checkpointable(make(), torch.randn(*shape), timer=one_millisecond)
    limit = at_fraction(chk, fraction)
    predicted = chk.get_expected_memory()
    assert predicted <= limit
    x = torch.randn(*shape)
    grads = sum(parameter.nbytes for parameter in chk.parameters())
    loss_bytes = 2 * chk(x).nbytes  # square() and its gradient are the user's
    training_step(chk, x)
    chk.zero_grad(set_to_none=False)
    accumulating = peak_of(lambda: training_step(chk, x), CPU)
    chk.zero_grad(set_to_none=True)
    creating = peak_of(lambda: training_step(chk, x), CPU)
    assert accumulating <= predicted + loss_bytes
    assert creating <= predicted + grads + loss_bytes
    assert accumulating >= 0.9 * predicted
    plain = copy.deepcopy(chk._sequential)
    eager = peak_of(lambda: training_step(plain, x), CPU)
    if fraction <= 0.25:
        assert accumulating < 0.8 * eager


def test_limit_counts_the_output_and_refuses_one_byte_too_little():
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4096))
    chk = Checkpointable(net, torch.randn(64, 8), timer=one_millisecond)
    output = 64 * 4096 * 4
    least = least_limit(chk)
    assert chk.held_bytes >= output
    assert least >= 2 * output  # the output and its gradient
    chk.compute_sequence(least)
    with pytest.raises(InfeasibleBudgetError, match=f"at least {least} bytes"):
        chk.compute_sequence(least - 1)
    assert chk.mem_limit == least  # the plan that works is kept
    chk(torch.randn(64, 8)).sum().backward()


def test_nothing_stays_alive_after_the_step():
    chk = Checkpointable(residual_net(4), images(1)[0], timer=one_millisecond)
    at_fraction(chk, 0.3)
    x = images(1)[0]
    training_step(chk, x)
    chk.zero_grad(set_to_none=False)
    with rotor.memory.MemoryMeter(CPU) as meter:
        meter.run("step", lambda: training_step(chk, x))
        meter.run("forward only", lambda: chk(x).sum().item())
    assert meter.usage("step").kept_bytes == 0
    assert meter.usage("forward only").kept_bytes == 0


# -- plans --------------------------------------------------------------------------------------


def test_more_memory_is_never_slower():
    chk = Checkpointable(residual_net(5), images(1)[0], timer=one_millisecond)
    least, most = least_limit(chk), plain_peak(chk)
    makespans = []
    for step in range(6):
        chk.compute_sequence(least + (most - least) * step // 5)
        makespans.append(chk.get_expected_makespan())
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] > makespans[-1]


def test_pure_views_join_their_neighbour():
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6), nn.Identity(), nn.Unflatten(1, (2, 3)), nn.Linear(3, 3)
    )
    chk = Checkpointable(net, torch.randn(5, 3, 4), timer=one_millisecond)
    assert [stage.name for stage in chk.chain.stages] == ["0..3", "4"]
    twin = copy.deepcopy(net)
    chk.compute_sequence(least_limit(chk))
    assert_trains_like(chk, twin, [torch.randn(5, 3, 4)])


def test_other_inputs_get_their_own_plan_within_the_same_limit():
    twin = residual_net(4)
    chk = Checkpointable(copy.deepcopy(twin), images(1, batch=4)[0], timer=one_millisecond)
    limit = at_fraction(chk, 0.4)
    batches = [*images(1, 4), *images(1, 2), *images(1, 4), *images(1, 3)]
    assert_trains_like(chk, twin, batches)
    assert len(chk._plans) == 3
    assert chk.get_expected_memory() <= limit
    with pytest.raises(InfeasibleBudgetError):
        chk(images(1, 64)[0])
    strict = Checkpointable(
        residual_net(2), images(1)[0], 10**9, timer=one_millisecond, new_inputs="error"
    )
    strict(images(1)[0])
    with pytest.raises(rotor.NotMeasuredError, match=r"\(2, 3, 12, 12\) torch.float32"):
        strict(images(1, 2)[0])


def test_old_plans_are_forgotten():
    chk = Checkpointable(mlp(2), None, 10**9, timer=one_millisecond, max_plans=2)
    for batch in (2, 3, 4):
        chk(torch.randn(batch, 32)).sum().backward()
    assert len(chk._plans) == 2


def test_a_replaced_child_is_noticed():
    chk = Checkpointable(mlp(3, dropout=0.0), torch.randn(4, 32), 10**9, timer=one_millisecond)
    chk(torch.randn(4, 32))
    chk._modules["1"] = nn.ReLU()
    x = torch.randn(4, 32)
    chk(x).sum().backward()
    expected = nn.Sequential(*chk.children())(x)
    assert torch.equal(chk(x), expected)


def test_a_module_exchanged_deep_inside_is_noticed():
    twin = residual_net(4)
    chk = Checkpointable(copy.deepcopy(twin), images(1)[0], timer=one_millisecond)
    at_fraction(chk, 0.0)
    norm = nn.BatchNorm2d(8, momentum=0.5)
    chk[1][2].norm, twin[1][2].norm = copy.deepcopy(norm), norm
    assert_trains_like(chk, twin, images(2))


def test_lazy_measurement_at_the_first_training_step():
    twin = residual_net(3)
    chk = Checkpointable(copy.deepcopy(twin), mem_limit=10**7, timer=one_millisecond)
    assert "not measured yet" in repr(chk)
    assert_trains_like(chk, twin, images())
    assert chk.get_expected_memory() <= 10**7


def test_on_a_cpu_the_limit_must_be_given():
    chk = Checkpointable(mlp(2), timer=one_millisecond)
    with pytest.raises(rotor.MemoryLimitError, match="no memory limit is given, and on the cpu"):
        chk(torch.randn(4, 32))
    chk.measure(torch.randn(4, 32))
    with pytest.raises(rotor.MemoryLimitError, match="Give one in bytes"):
        chk.compute_sequence()


@pytest.mark.parametrize("limit", [0, -5, 2.5, "many", True])
def test_limits_that_are_no_number_of_bytes(limit):
    with pytest.raises(rotor.MemoryLimitError, match="mem_limit is"):
        Checkpointable(mlp(2), mem_limit=limit)


def test_reference_solver_gives_the_same_makespan():
    chk = Checkpointable(mlp(3), torch.randn(8, 32), timer=one_millisecond, mem_slots=60)
    limit = at_fraction(chk, 0.4)
    makespan = chk.get_expected_makespan()
    chk.compute_sequence(limit, force_python=True)
    assert chk.get_expected_makespan() == makespan


# -- the module around it -----------------------------------------------------------------------


def test_eval_and_no_grad_are_the_plain_module():
    net = residual_net(3)
    chk = Checkpointable(net)  # never measured: nothing is needed
    x = images(1)[0]
    chk.eval()
    assert not net.training
    assert torch.equal(chk(x), net(x))
    chk.train()
    assert net.training
    with torch.no_grad():
        assert not chk(x).requires_grad


def test_measuring_changes_nothing():
    net = residual_net(3)
    net.eval()
    net[1][0].norm.train()
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    x = images(1)[0]
    x.requires_grad_()
    before = copy.deepcopy(net)
    rng = torch.get_rng_state()
    Checkpointable(net, x, timer=one_millisecond)
    assert torch.equal(torch.get_rng_state(), rng)
    assert x.grad is None
    assert [m.training for m in net.modules()] == [m.training for m in before.modules()]
    for (name, mine), theirs in zip(
        net.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in net.parameters())


def test_state_dict_parameters_and_children_keep_their_names():
    net = residual_net(2)
    chk = Checkpointable(net)
    assert list(chk.state_dict()) == list(net.state_dict())
    assert [n for n, _ in chk.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [n for n, _ in chk.named_modules()][1:] == [n for n, _ in net.named_modules()][1:]
    other = residual_net(2)
    chk.load_state_dict(other.state_dict())
    assert torch.equal(net[0].weight, other[0].weight)
    chk.double()
    assert net[0].weight.dtype == torch.float64


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent_and_keep_their_plan(way):
    twin = residual_net(3)
    original = Checkpointable(copy.deepcopy(twin), images(1)[0])
    original._timer = None
    at_fraction(original, 0.2)
    copied = way(original)
    assert copied.schedule == original.schedule
    assert copied[0] is not original[0]
    assert copied._sequential[0] is copied[0]
    assert_trains_like(copied, copy.deepcopy(twin), images(2))
    assert torch.equal(original[0].weight, twin[0].weight)


def test_save_and_load_of_the_whole_module():
    chk = Checkpointable(mlp(2), torch.randn(4, 32), 10**9)
    buffer = io.BytesIO()
    torch.save(chk, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded.schedule == chk.schedule


def test_container_behaviour_follows_the_sequential():
    net = mlp(2)
    chk = Checkpointable(net)
    assert len(chk) == len(net)
    assert chk[0] is net[0]
    assert list(chk) == list(net)


def test_nested_containers_with_hooks_run_as_one_stage():
    calls = []
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    inner.register_forward_hook(lambda *_: calls.append(1))
    chk = Checkpointable(
        nn.Sequential(nn.Linear(8, 8), inner), torch.randn(2, 8), 10**9, timer=one_millisecond
    )
    assert [stage.name for stage in chk.chain.stages] == ["0", "1"]
    calls.clear()
    chk(torch.randn(2, 8)).sum().backward()
    assert calls == [1]


# -- limits, honestly ---------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("module", [nn.Linear(2, 2), OwnForward(nn.Linear(2, 2)), nn.Sequential()])
def test_modules_that_are_not_sequential(module):
    with pytest.raises(rotor.NotSequentialError, match=r"nn\.Sequential"):
        Checkpointable(module)


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError("inside")


class ReturnsText(nn.Module):
    def forward(self, x):
        return x, "text"


OUTSIDE = nn.Parameter(torch.ones(8))


class UsesOutside(nn.Module):
    def forward(self, x):
        return x * OUTSIDE


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (nn.ReLU(inplace=True), rotor.InPlaceInputError, "first computation of stage 1 overwrites"),
        (Fails(), rotor.StageError, "stage 1 failed on the output .* KeyError: 'inside'"),
        (nn.Linear(3, 3), rotor.StageError, "stage 1 failed .* RuntimeError"),
        (ReturnsText(), rotor.StageError, "stage 1 must return a tensor.* it returned str"),
        (UsesOutside(), rotor.StageError, r"stage 1 uses a tensor of shape \(8,\)"),
    ],
)
def test_stages_that_cannot_be_checkpointed(bad, error, message):
    net = nn.Sequential(nn.Linear(8, 8), bad, nn.BatchNorm1d(8))
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(4, 8)
    values = x.clone()
    rng = torch.get_rng_state()
    with pytest.raises(error, match=message) as caught:
        Checkpointable(net, x)
    assert caught.value.stage == "1"
    assert torch.equal(x, values)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(net.state_dict()[key], before[key]) for key in before)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_an_in_place_first_stage_does_not_touch_the_sample():
    x = torch.randn(4, 8)
    values = x.clone()
    with pytest.raises(rotor.InPlaceInputError, match=r"ReLUAtEnd"):
        Checkpointable(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), x)
    assert torch.equal(x, values)


def test_asking_before_measuring():
    chk = Checkpointable(mlp(2))
    with pytest.raises(rotor.NotMeasuredError, match="nothing has been measured"):
        chk.compute_sequence(100)
    chk.measure(torch.randn(2, 32))
    with pytest.raises(rotor.NotMeasuredError, match="no schedule yet"):
        chk.get_expected_makespan()
    with pytest.raises(ValueError, match="strategy 'best' is unknown"):
        chk.compute_sequence(10**9, strategy="best")
    with pytest.raises(TypeError, match="got dict"):
        chk({"x": 1})


# -- looking --------------------------------------------------------------------------------------


def test_printing_shows_schedule_costs_and_timeline(capsys, tmp_path):
    chk = Checkpointable(residual_net(6), images(1)[0], timer=one_millisecond)
    at_fraction(chk, 0.2)
    text = str(chk)
    for piece in ("Fc(", "Fe(", "B(", "peak ", "makespan ", "limit ", "|##", "MiB"):
        assert piece in text
    assert f"({chk.get_expected_memory()} bytes)" in text
    assert f"{chk.get_expected_makespan():.3f} ms" in text
    assert chk.schedule.method in text
    chk.display()
    assert capsys.readouterr().out.strip() == text
    chk.save_timeline(tmp_path / "timeline.svg")
    svg = (tmp_path / "timeline.svg").read_text()
    assert svg.startswith("<svg")
    assert svg.count("<rect") == len(chk.schedule.ops)


def test_blocks_are_reported_by_path():
    chk = Checkpointable(nn.Sequential(ResidualBlock(3), nn.Sequential(nn.Flatten())), timer=None)
    chk.measure(images(1)[0])
    assert [stage.name for stage in chk.chain.stages] == ["0..1.0"]


def test_use_schedule_checks_what_it_is_given():
    chk = Checkpointable(mlp(3), torch.randn(4, 32), timer=one_millisecond)
    schedule = rotor.solve(chk.chain, 10**9)
    chk.use_schedule(schedule)
    assert chk.schedule.ops == schedule.ops
    broken = rotor.Schedule(schedule.ops[:-1], 1.0, 1)
    with pytest.raises(rotor.InvalidScheduleError):
        chk.use_schedule(broken)
    assert chk.schedule.ops == schedule.ops
