"""Tensors on the host beside a step on a device: exact, and no part of its memory.

Under the rules of CUDA on a CPU, float64 (or int64) is the host's type; see `fake_cuda`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fake_cuda.device import FakeCuda, fake_cuda
from oracles.training import assert_trains_like, eager_copy
from rkgb import RkgbError, TraceError
from rkgb.elements.sample import counted_device
from rkgb.engine import Sample
from rockmate import Rockmate
from rockmate.networks.self_test import self_test
from rockmate.schedules.simulate import simulate
from runs.planned import wrap

HOST = torch.float64
ROWS, WIDTH = 64, 32


class Denoiser(nn.Module):
    """Time steps and a table on the host; the forward moves what it makes of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, dtype=HOST)
        self.register_buffer("scale", torch.tensor(0.5, dtype=HOST))
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, steps: Tensor, kinds: Tensor) -> Tensor:
        angles = steps[:, None] * torch.arange(WIDTH, dtype=HOST).exp().reciprocal()
        waves = self.drop(angles.sin() + self.table(kinds).cos())
        for layer in self.body:
            x = layer(x * self.scale + waves.float())
        return x.square().mean()


def call() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.rand(ROWS, dtype=HOST), torch.randint(0, 10, (ROWS,))


def requested(rk: Rockmate, sample: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return the peak of what a planned step asks the device for: predicted, and measured."""
    planned = rk._rockmate.planned
    predicted = simulate(planned.network.asked, planned.plan.steps).peak_bytes
    ours, _ = self_test(planned, rk, Sample.of(rk, sample), None)
    return predicted, ours.peak_bytes


@pytest.mark.parametrize("fraction", [1.0, 0.7])
def test_it_trains_exactly_and_is_counted_where_it_lies(fraction: float) -> None:
    model, sample = Denoiser(), call()
    eager = eager_copy(model)
    with fake_cuda(host=[HOST]):
        rk = wrap(model, sample, fraction)
        predicted, measured = requested(rk, sample)
        assert measured == predicted
        assert_trains_like(rk, eager, call())
    problem = rk._rockmate.planned.network.problem
    infos = rk._rockmate.planned.network.graph.infos
    on_host = {name for name, info in infos.items() if info.is_on_host}
    assert {s.size_bytes for s in problem.storages if s.name in on_host} == {0}
    made = [infos[s.name].storage_bytes for s in problem.storages if s.name in on_host]
    with fake_cuda():
        all_on_device = wrap(Denoiser(), sample, fraction)
    more = all_on_device._rockmate.planned.network.problem
    assert sum(made) == sum(s.size_bytes for s in more.storages) - sum(
        s.size_bytes for s in problem.storages
    )


class Reader(nn.Module):
    """A recurrent network over packed sequences, whose lengths are numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True)
        return self.head(out).square().mean()


def test_lengths_of_packed_sequences() -> None:
    model = Reader()
    sample = torch.randn(4, 7, 8), torch.tensor([7, 3, 5, 2])
    eager = eager_copy(model)
    with fake_cuda(host=[torch.int64]):
        rk = wrap(model, sample, "1MiB")
        assert_trains_like(rk, eager, sample)
        assert_trains_like(rk, eager, (torch.randn(4, 7, 8), torch.tensor([2, 7, 7, 1])), steps=1)


class Returns(nn.Module):
    """Hands its result out on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return y.mean(), y.to(HOST)


def test_gradients_that_begin_on_the_host_are_refused() -> None:
    x = torch.randn(4, 8)
    with fake_cuda(host=[HOST]):
        rk = wrap(Returns(), x, 1.0)
        rk(x)[0].backward()
        assert all(p.grad is not None for p in rk.parameters())
        with pytest.raises(RkgbError, match=r"lies on the CPU and gets a gradient"):
            rk(x)[1].sum().backward()


def test_devices_of_a_step() -> None:
    cpu, first, second = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    assert counted_device({}) == cpu
    assert counted_device({cpu: "x"}) == cpu
    assert counted_device({cpu: "x", first: "y"}) == first
    assert counted_device({second: "y"}) == second
    with pytest.raises(TraceError, match=r"y on cuda:0 and z on cuda:1.*model.part"):
        counted_device({cpu: "x", first: "y", second: "z"})
    with pytest.raises(TraceError, match=r"one device.*x on cpu and y on meta"):
        counted_device({cpu: "x", torch.device("meta"): "y"})


def test_the_emulation_tells_both_apart() -> None:
    device = FakeCuda(host=[HOST])
    there, here = torch.ones(100, dtype=HOST), torch.ones(100)

    def step(_span: object) -> Tensor:
        moved = there.float() + here  # 800 bytes of the device
        back = moved.double() * 2  # 1600 of the host
        return back.float()

    assert device.trace_memory(step).peak_bytes == 800
    assert not device.holds(there)
    assert device.holds(here)
