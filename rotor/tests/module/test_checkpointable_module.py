"""The module around a plan: manners of the original, refusals, and what it prints."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import rotor
from oracles.checkpointables import (
    assert_trains_like,
    at_fraction,
    least_limit,
    one_millisecond,
    plain_peak,
)
from rotor import Checkpointable, InfeasibleBudgetError
from zoo.chains import ResidualBlock, images, mlp, residual_net

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
    with pytest.raises(rotor.MemoryLimitError, match="Give one: "):
        chk.compute_sequence()


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
