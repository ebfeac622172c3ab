"""What autograd sees of a `Checkpointable`, and the memory that a step takes."""

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.flop_counter import FlopCounterMode

import rotor
from oracles.checkpointables import at_fraction, least_limit, one_millisecond, peak_of
from rotor import Checkpointable, InfeasibleBudgetError
from zoo.chains import images, in_place_net, mlp, residual_net

CPU = torch.device("cpu")


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
    chk = Checkpointable(mlp(3), torch.randn(4, 32), timer=one_millisecond)
    at_fraction(chk, 0.0)
    loss = chk(torch.randn(4, 32)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(rotor.BackwardError, match="already run"):
        loss.backward()


def test_a_second_backward_runs_where_everything_is_kept():
    net = mlp(3)
    chk = Checkpointable(copy.deepcopy(net), torch.randn(4, 32), 10**9, timer=one_millisecond)
    x = torch.randn(4, 32)
    for module in (chk, net):
        torch.manual_seed(0)
        loss = module(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(chk.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_stages_of_which_everything_is_kept_are_no_functions_of_their_own():
    chk = Checkpointable(mlp(4), torch.randn(4, 32), 10**9, timer=one_millisecond)
    x = torch.randn(4, 32)

    def names(output):
        found, todo = set(), [output.grad_fn]
        while todo:
            node = todo.pop()
            found.add(type(node).__name__)
            todo += [inner for inner, _ in node.next_functions if inner is not None]
        return found

    assert "_StageFunctionBackward" not in names(chk(x))
    at_fraction(chk, 0.0)
    assert "_StageFunctionBackward" in names(chk(x))


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
        (lambda: in_place_net(8, 12), (6, 3, 24, 24)),
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
    # A stage that runs as it is may need less than predicted: not its input. Functions hold it.
    plan = chk._plans[chk._current]
    plan.program = dataclasses.replace(plan.program, plain=frozenset())
    chk.zero_grad(set_to_none=False)
    in_functions = peak_of(lambda: training_step(chk, x), CPU)
    assert accumulating <= in_functions <= predicted + loss_bytes
    assert in_functions >= 0.9 * predicted
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
    with rotor.runtime.memory.MemoryMeter(CPU) as meter:
        meter.run("step", lambda: training_step(chk, x))
        meter.run("forward only", lambda: chk(x).sum().item())
    assert meter.usage("step").kept_bytes == 0
    assert meter.usage("forward only").kept_bytes == 0


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_counters_and_hooks_of_many_gradients_see_a_step(fraction):
    """What looks at autograd's nodes while it runs: they are those of parameters and outputs."""
    twin = mlp(4, dropout=0.0)
    chk = Checkpointable(copy.deepcopy(twin), torch.randn(8, 32), timer=one_millisecond)
    at_fraction(chk, fraction)
    x = torch.randn(8, 32)
    flops, seen = [], []
    for module in (twin, chk):
        found = []
        watched = list(module.parameters())
        handle = register_multi_grad_hook(watched, found.extend)
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        handle.remove()
        flops.append(counter.get_total_flops())
        seen.append(found)
    assert flops[0] < flops[1] if fraction == 0.0 else flops[0] == flops[1]
    assert len(seen[0]) == len(seen[1]) == len(list(twin.parameters()))
    assert all(map(torch.equal, *seen))
