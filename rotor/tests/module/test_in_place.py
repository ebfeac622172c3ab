"""Modules that overwrite their input: joined to the stage that made it, with eager's results."""

import copy

import pytest
import torch
from torch import nn

import rotor
from oracles.checkpointables import assert_trains_like, at_fraction, one_millisecond
from rotor import Checkpointable
from rotor.schedules.ops import ForwardEnableGrad
from zoo.chains import ResidualBlock, images, in_place_net


def measured(net, sample):
    return Checkpointable(net, sample, timer=one_millisecond)


def stage_names(chk):
    return [stage.name for stage in chk.chain.stages]


def relu():
    return nn.ReLU(inplace=True)


# -- joined -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_training_is_bit_equal_within_every_budget(fraction):
    twin = in_place_net()
    chk = measured(copy.deepcopy(twin), images(1)[0])
    limit = at_fraction(chk, fraction)
    assert chk.get_expected_memory() <= limit
    recomputed = chk.schedule.forward_count - len(chk.chain)
    assert (recomputed == 0) == (fraction == 1.0)
    assert_trains_like(chk, twin, images())


@pytest.mark.parametrize("strategy", ["none", "chen", "revolve", "recompute_all"])
def test_every_strategy_is_bit_equal(strategy):
    twin = in_place_net(3)
    chk = measured(copy.deepcopy(twin), images(1)[0])
    arguments = {"chen": {"segments": 3}, "revolve": {"checkpoints": 1}}.get(strategy, {})
    chk.compute_sequence(strategy=strategy, **arguments)
    assert_trains_like(chk, twin, images())


def test_an_in_place_module_joins_only_the_stage_before_it():
    net = in_place_net(2)
    names = list(net.state_dict())
    chk = measured(net, images(1)[0])
    # Convolution and ReLU; convolution; BatchNorm and ReLU; ...; linear and dropout.
    assert stage_names(chk) == ["0..1", "2", "3..4", "5", "6..8", "9..10", "11..12"]
    assert list(chk) == list(net)
    assert list(chk.state_dict()) == names
    assert [name for name, _ in chk.named_children()] == [name for name, _ in net.named_children()]


def test_features_of_a_vgg():
    layers, channels = [], 3
    for width in (8, 8, 8, 8, "M", 16, 16, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), relu()]
            channels = width
    twin = nn.Sequential(*layers)
    batches = [torch.randn(8, 3, 32, 32) for _ in range(3)]
    chk = measured(copy.deepcopy(twin), batches[0])
    assert stage_names(chk) == ["0..1", "2..3", "4..5", "6..7", "8", "9..10", "11..12", "13"]
    at_fraction(chk, 0.2)
    assert chk.schedule.forward_count > len(chk.chain)
    assert_trains_like(chk, twin, batches)


def test_frozen_first_layers_and_an_input_without_gradients():
    twin = in_place_net()
    for module in twin[:4]:
        module.requires_grad_(False)
    chk = measured(copy.deepcopy(twin), images(1)[0])
    at_fraction(chk, 0.0)
    x, start = images(1)[0], torch.get_rng_state()
    for module in (chk, twin):
        torch.set_rng_state(start)
        module(x).square().mean().backward()
    for mine, theirs in zip(chk.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_nested_sequentials_and_repeated_modules(fraction):
    act, shared = relu(), nn.Linear(16, 16)
    hooked = nn.Sequential(relu(), nn.Linear(16, 16))
    hooked.not_really_sequential = True
    layers = [nn.Linear(16, 16), nn.Sequential(act, nn.Sequential(shared, act)), shared]
    twin = nn.Sequential(nn.Sequential(*layers), hooked, nn.Linear(16, 16), nn.Sequential(act))
    chk = measured(copy.deepcopy(twin), torch.randn(8, 16))
    # The one with hooks runs as one module, whose first computation is in place.
    assert stage_names(chk) == ["0.0..0.1.0", "0.1.1.0..0.1.1.1", "0.2..1", "2..3.0"]
    at_fraction(chk, fraction)
    assert_trains_like(chk, twin, [torch.randn(8, 16) for _ in range(3)])


class Activated(nn.Module):
    """Overwrites its input first, and then computes something else, as pre-activation blocks do."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = torch.relu_(x)
        return x + self.linear(x)


class Fork(nn.Module):
    def forward(self, x):
        return x.sin(), x.cos()


class First(nn.Module):
    """Computes with the first of a pair, and hands on the second as it is."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        return self.linear(pair[0]), pair[1]


class AddToSecond(nn.Module):
    def forward(self, pair):
        return pair[0], pair[1].add_(pair[0])


class Product(nn.Module):
    def forward(self, pair):
        return pair[0] * pair[1]


class WritesUnseen(nn.Module):
    """Writes without raising the version, as kernels outside of torch may."""

    def forward(self, x):
        x.data.clamp_(min=-0.1)
        return x


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class KeepSmall(nn.Module):
    def forward(self, x):
        return x.clamp_(max=9)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        # What comes after the overwriting is in its stage too.
        ([nn.Linear(16, 16), Activated(16), nn.Linear(16, 16)], ["0", "1", "2..3", "4"]),
        ([nn.Linear(16, 16), Activated(16), Activated(16)], ["0", "1", "2..4"]),
        # A view in between: the memory is the linear layer's.
        ([nn.Linear(16, 16), nn.Unflatten(1, (4, 4)), relu(), nn.Flatten()], ["0", "1", "2..5"]),
        # The pair's second was made by stage 1, and has passed through stage 2.
        (
            [nn.Linear(16, 16), Fork(), First(16), AddToSecond(), Product()],
            ["0", "1", "2", "3..5", "6"],
        ),
        (
            [nn.Linear(16, 16), Fork(), First(16), First(16), Product()],
            ["0", "1", "2", "3", "4", "5", "6"],
        ),
        ([nn.Linear(16, 16), WritesUnseen(), nn.Linear(16, 16)], ["0", "1", "2..3", "4"]),
    ],
)
def test_a_stage_reaches_back_to_where_the_memory_was_made(layers, names):
    twin = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), *layers)
    chk = measured(copy.deepcopy(twin), torch.randn(8, 16))
    assert stage_names(chk) == names
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, [torch.randn(8, 16) for _ in range(3)])


def test_whole_numbers_overwritten_between_stages():
    twin = nn.Sequential(Double(), KeepSmall(), nn.Embedding(10, 8), nn.Linear(8, 8), nn.Tanh())
    tokens = [torch.randint(0, 9, (4, 6)) for _ in range(3)]
    chk = measured(copy.deepcopy(twin), tokens[0])
    assert stage_names(chk) == ["0..1", "2", "3", "4"]
    at_fraction(chk, 0.0)
    assert_trains_like(chk, twin, tokens)


def test_values_that_are_no_numbers_do_not_count_as_overwritten():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    chk = measured(net, torch.full((2, 4), float("nan")))
    assert stage_names(chk) == ["0", "1", "2"]


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stage"),
    [
        ([relu(), nn.Linear(8, 8)], "0"),
        ([nn.Flatten(), nn.Sequential(relu()), nn.Linear(8, 8)], "1.0"),
        ([Activated(8), nn.Linear(8, 8)], "0"),
        ([WritesUnseen(), nn.Linear(8, 8)], "0"),
    ],
)
def test_a_module_that_overwrites_what_the_caller_gives(layers, stage):
    net = nn.Sequential(*layers, nn.BatchNorm1d(8))
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(4, 8)
    values, rng = x.clone(), torch.get_rng_state()
    with pytest.raises(rotor.InPlaceInputError, match=r"the caller.*inplace=False") as e:
        measured(net, x)
    assert e.value.stage == stage
    assert f"stage {stage} overwrites the input that the whole module is given" in str(e.value)
    assert torch.equal(x, values)
    assert x._version == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(net.state_dict()[key], before[key]) for key in before)


def test_the_second_of_a_pair_that_the_caller_gives():
    net = nn.Sequential(First(8), AddToSecond(), Product())
    with pytest.raises(rotor.InPlaceInputError, match="stage 1 overwrites the input that the"):
        measured(net, (torch.randn(2, 8), torch.randn(2, 8)))


def test_overwriting_what_backward_needs_fails_as_in_plain_pytorch():
    net = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), relu(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as theirs:
        net(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as mine:
        measured(net, x)
    assert isinstance(mine.value, rotor.StageError)
    assert mine.value.stage == "1..2"
    assert "output 0 of Sigmoid" in str(mine.value)
    assert "output 0 of Sigmoid" in str(theirs.value)


def test_a_module_that_begins_to_overwrite_after_it_was_measured():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    chk = measured(net, torch.randn(4, 8))
    chk.compute_sequence(strategy="recompute_all")
    assert not isinstance(chk.schedule.ops[1], ForwardEnableGrad)
    net[1].inplace = True
    with pytest.raises(
        rotor.InPlaceInputError, match="did not do so when it was measured"
    ) as caught:
        chk(torch.randn(4, 8))
    assert caught.value.stage == "1"
    chk.measure(torch.randn(4, 8))
    assert stage_names(chk) == ["0..1", "2", "3", "4"]


def test_a_module_that_overwrites_only_where_nothing_is_recorded():
    class Sparing(nn.Module):
        def forward(self, x):
            return torch.relu(x) if torch.is_grad_enabled() else torch.relu_(x)

    with pytest.raises(rotor.InPlaceInputError, match="in some runs and not in others"):
        measured(nn.Sequential(nn.Linear(8, 8), Sparing()), torch.randn(4, 8))


def test_blocks_with_their_own_in_place_modules_stay_whole():
    chk = measured(nn.Sequential(ResidualBlock(3), relu(), ResidualBlock(3)), images(1)[0])
    assert stage_names(chk) == ["0..1", "2"]
