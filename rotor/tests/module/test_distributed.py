"""A `Checkpointable` under DistributedDataParallel: two processes, against the plain module."""

import copy

import pytest
import torch
import torch.distributed

import rotor
from oracles.checkpointables import one_millisecond
from rotor import Checkpointable
from runs.processes import run_in_processes
from zoo.chains import residual_net

STEPS = 3


def _below_plain(net, sample):
    """A plan that recomputes, half-way between the smallest limit and what plain training takes."""
    chk = Checkpointable(net, sample, timer=one_millisecond)
    chk.compute_sequence(10**12)
    plain = chk.get_expected_memory()
    with pytest.raises(rotor.InfeasibleBudgetError) as caught:
        chk.compute_sequence(1)
    chk.compute_sequence((plain + caught.value.minimum_bytes) // 2, intervals=False)
    assert chk.schedule.forward_count > len(chk.chain)
    return chk


def _watch(module):
    """Return a list to which each bucket adds how many gradients there were when it was sent."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    accumulated, sent = [], []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(accumulated.append)

    def send(_state, bucket):
        sent.append(len(accumulated))
        return allreduce_hook(None, bucket)

    module.register_comm_hook(None, send)
    return sent


def _train(rank, *, in_first_step=False, **arguments):
    """Step by step the same outputs, gradients, statistics and weights; planned before, or then."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net = residual_net(channels=80)  # more than the megabyte of the first bucket
    twin, alone = copy.deepcopy(net), copy.deepcopy(net)
    generator = torch.Generator().manual_seed(rank)  # each process has data of its own
    batches = [torch.randn(4, 3, 12, 12, generator=generator) for _ in range(STEPS)]
    arguments |= {"bucket_cap_mb": 0.2}
    planned = _below_plain(copy.deepcopy(net) if in_first_step else net, batches[0])
    if in_first_step:
        planned = Checkpointable(net, mem_limit=planned.get_expected_memory())
    ours = DistributedDataParallel(planned, **arguments)
    theirs = DistributedDataParallel(twin, **arguments)

    torch.manual_seed(7 + rank)
    alone(batches[0]).square().mean().backward()

    ours_sent, theirs_sent = _watch(ours), _watch(theirs)
    for step, batch in enumerate(batches):
        outputs = []
        for module in (theirs, ours):
            torch.manual_seed(7 + rank)  # dropout
            outputs.append(module(batch))
            outputs[-1].square().mean().backward()
        assert torch.equal(*outputs)
        for mine, his in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, his.grad)
        for mine, his in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, his)
        if step == 0:
            assert not torch.equal(alone[0].weight.grad, net[0].weight.grad), "nothing was averaged"
        assert len(ours_sent) == len(theirs_sent)
        with torch.no_grad():
            for parameter in (*net.parameters(), *twin.parameters()):
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    assert ours_sent[-2] < ours_sent[-1], "buckets leave while backward still runs"


def _plain(rank):
    _train(rank)


def _static_views(rank):
    _train(rank, in_first_step=True, gradient_as_bucket_view=True, static_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["_plain", "_static_views"])
def test_two_processes_train_as_with_the_plain_module(work):
    run_in_processes(__file__, work)
