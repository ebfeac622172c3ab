"""The device object: what is refused, and whole modules under the rules of CUDA on a CPU."""

import copy

import pytest
import torch
from torch import nn

import rotor
from fake_cuda.of_rotor import fake_cuda
from oracles.checkpointables import (
    assert_trains_like,
    least_limit,
    one_millisecond,
    peak_of,
    plain_peak,
)
from rotor import Checkpointable
from rotor.runtime.device import Cuda, device_of, is_known
from rotor.runtime.memory import OPTIMIZER_BYTES_PER_NUMBER
from zoo.chains import images, residual_net

CPU = torch.device("cpu")


def test_what_the_limit_found_out_is_made_of(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    device = device_of(torch.device("cuda", 0))
    assert isinstance(device, Cuda)
    assert device.usable_bytes(200) == 900
    assert device.usable_bytes(0) == 1080
    assert device.block_bytes(1) == device.block_bytes(512) == 512
    assert device_of(CPU).usable_bytes(0) is None


def test_rocm_is_refused_by_name(monkeypatch):
    assert is_known(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not is_known(torch.device("cuda", 0))
    assert not is_known(torch.device("xpu"))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7])
def test_the_limit_holds_in_blocks(fraction):
    net, (x,) = residual_net(4, dropout=0.2), images(1)
    with fake_cuda():
        chk = Checkpointable(copy.deepcopy(net), x, timer=one_millisecond)
        least, most = least_limit(chk), plain_peak(chk)
        limit = int(least + fraction * (most - least))
        chk.compute_sequence(limit)
        chk(x).square().mean().backward()
        chk.zero_grad(set_to_none=False)
        assert peak_of(lambda: chk(x).square().mean().backward(), CPU) <= limit
        other = Checkpointable(copy.deepcopy(net), x, limit, timer=one_millisecond)
        assert_trains_like(other, copy.deepcopy(net), images())


def test_the_default_limit_leaves_room_for_the_states_of_the_optimizer():
    """At the first step there are none; Adam's come after it, and the plan stays."""
    net, (x,) = residual_net(4, channels=24), images(1)
    numbers = sum(p.numel() for p in net.parameters())
    coming = (4 + OPTIMIZER_BYTES_PER_NUMBER) * numbers
    plain = plain_peak(Checkpointable(copy.deepcopy(net), x, timer=one_millisecond))
    free = coming + plain  # enough for the step alone, and for nothing that comes after it
    with fake_cuda(free):
        chk = Checkpointable(net, timer=one_millisecond)
        optimizer = torch.optim.Adam(chk.parameters())
        chk(x).square().mean().backward()
        optimizer.step()
        assert f"({int(0.9 * plain)} bytes)" in str(chk)
        assert chk.schedule.forward_count > len(chk.chain)
        states = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        gradients = [p.grad for p in chk.parameters()]
        assert sum(t.nbytes for t in (*states, *gradients)) <= coming
        optimizer.zero_grad(set_to_none=False)
        peak = peak_of(lambda: chk(x).square().mean().backward(), CPU)
        assert peak + coming <= free
    with pytest.raises(rotor.MemoryLimitError):
        Checkpointable(copy.deepcopy(net), timer=one_millisecond)(x)


class Library(nn.Module):
    """Keeps memory from its first run on, in forward and in backward, as cuBLAS does."""

    kept: list[torch.Tensor]

    def __init__(self):
        super().__init__()
        self.kept, self.weight = [], nn.Parameter(torch.ones(4))

    def forward(self, x):
        if not self.kept:
            self.kept.append(torch.empty(1 << 22))
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self.use)
        return y

    def use(self, _gradient):
        if len(self.kept) < 2:
            self.kept.append(torch.empty(1 << 22))


def test_what_a_library_keeps_is_counted_nowhere():
    found = []
    with fake_cuda():
        for keeps in (True, False):
            parts = [nn.Linear(4, 4), Library(), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
            if not keeps:
                parts[1].kept = [torch.empty(0)] * 2
            chk = Checkpointable(nn.Sequential(*parts), torch.ones(8, 4), timer=one_millisecond)
            assert len(parts[1].kept) == 2
            found.append((least_limit(chk), plain_peak(chk)))
    assert found[0] == found[1]
