"""OpTimes of a stage from several rounds, and when rounds end; no clock is read."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rotor.runtime.measure import measure_module
from rotor.runtime.timing import MAX_ROUNDS, MIN_ROUNDS, PATIENCE_MS, OpTimes, StageTimes, in_rounds


def times(factor=1.0, *, first=1.2, again=5.5, emptied=3.4):
    return StageTimes(*(factor * ms for ms in (first, 0.9, 1.0, 2.0, again, emptied)))


def counted(lengths):
    """Visits of two stages that take so much longer than they need, and how many were made."""
    visits = []

    def visit_all():
        visits.append(lengths(len(visits)))
        return [times(factor) for factor in visits[-1]]

    in_rounds(visit_all)
    return len(visits)


def test_rounds_end_when_the_two_least_of_each_stage_agree():
    assert counted(lambda turn: (1, 1)) == MIN_ROUNDS
    # each round is disturbed, but never at the same stage twice
    assert counted(lambda turn: (1 + (turn == 0), 1 + (turn == 1))) == MIN_ROUNDS
    assert counted(lambda turn: (1, 9 - turn)) == MAX_ROUNDS


def test_long_stages_are_visited_once():
    assert counted(lambda turn: (PATIENCE_MS, 1)) == 1


def test_prices_have_a_graph_of_its_own_and_fetching_in_them():
    prices = OpTimes.of([times(), times(2.0)], always_record=False)
    assert (prices.record, prices.backward) == (pytest.approx(1.0 + 0.3), 2.0)
    assert prices.forward == pytest.approx(0.9 + 0.3 + (5.5 - 3.9))
    assert prices.forget == pytest.approx((3.4 - 3.0) + (5.5 - 3.9))


def test_noise_makes_no_price_negative_and_a_recording_stage_pays_for_it():
    prices = OpTimes.of([times(first=0.5, again=1.0, emptied=1.0)], always_record=True)
    assert (prices.forward, prices.forget) == (1.0, 0.0)


class Operations(TorchDispatchMode):
    """How many operations of each name run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def products(call):
    """A timer: a millisecond for each matrix product."""
    with Operations() as operations:
        call()
    return float(sum(name in ("aten.mm", "aten.addmm") for name in operations.names))


def additions(call):
    """A timer: a millisecond for each addition to a gradient that is there."""
    with Operations() as operations:
        call()
    return float(operations.names.count("aten.add_"))


def backward_prices(module, sample, timer):
    return [
        s.options[0].bwd_time_ms for s in measure_module(module, sample, timer=timer).chain.stages
    ]


def linears(frozen=0):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*(Whole(layer) for layer in layers))


class Whole(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def test_a_stage_pays_for_gradients_of_its_input_where_a_step_computes_them():
    sample = torch.randn(2, 4)
    assert backward_prices(linears(), sample, products) == [1, 2, 2]
    assert backward_prices(linears(), sample.clone().requires_grad_(), products) == [2, 2, 2]
    assert backward_prices(linears(frozen=2), sample, products) == [0, 0, 1]


def test_gradients_are_added_to_what_the_parameters_have():
    module, sample = linears(), torch.randn(2, 4)
    assert backward_prices(module, sample, additions) == [0, 0, 0]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert backward_prices(module, sample, additions) == [2, 2, 2]


def test_measuring_leaves_gradients_and_hooks_alone():
    module, called = linears(), []
    before = dict(module.named_parameters())
    next(iter(before.values())).grad = torch.ones(4, 4)
    for parameter in before.values():
        parameter.register_hook(lambda grad: called.append("tensor"))
        parameter.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    gradients = {name: copy.deepcopy(p.grad) for name, p in before.items()}
    measure_module(module, torch.randn(2, 4), timer=products)
    after = dict(module.named_parameters())
    assert not called
    assert all(after[name] is parameter for name, parameter in before.items())
    for name, grad in gradients.items():
        assert (grad is None) == (after[name].grad is None)
        assert grad is None or torch.equal(grad, after[name].grad)


class LastOfLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def test_a_module_that_keeps_its_parameters_elsewhere_is_timed_with_them():
    module, sample = nn.Sequential(LastOfLSTM()), torch.randn(2, 3, 4)

    def other_operations(call):
        with Operations() as operations:
            call()
        return float(len(operations.names))

    parameter = next(module.parameters())
    parameter.register_post_accumulate_grad_hook(lambda p: pytest.fail("was accumulated"))
    assert backward_prices(module, sample, other_operations)[0] > 0
    assert parameter.grad is None
