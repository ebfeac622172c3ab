"""The meter sees every byte; a step is recorded in a small part of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rkgb.capture.record import make_B
from rkgb.capture.step import RecordedStep
from rkgb.capture.ways import Asked, Way
from rkgb.device.chosen import trace_memory
from rkgb.device.cpu import trace_by_profiler
from rkgb.device.rng import RngState
from rkgb.elements.sample import Sample
from rkgb.elements.tensor_info import storage_bytes, storage_id
from zoo.examples import EXAMPLES, example

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_the_meter_sees_every_byte(sizes: list[int]) -> None:
    def run(span: Any) -> list[Tensor]:
        with span("first"):
            kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            temporary = torch.empty(7000, dtype=torch.uint8)
            del temporary
        with span("second"):
            kept.pop()
        return kept

    trace = trace_memory(run, CPU)
    first, second = trace.spans
    assert first.added_peak_bytes == sum(sizes) + 7000
    assert first.end_bytes == second.start_bytes == sum(sizes)
    assert second.end_bytes == sum(sizes[:-1])
    assert trace.peak_bytes == sum(sizes) + 7000


def test_blocks_of_before_do_not_count() -> None:
    """Torch knows blocks that a profiler saw, and forgets none that is freed while none looks."""
    kept: list[Tensor] = []
    for _ in range(3):
        trace_by_profiler(lambda _span: kept.append(torch.empty(1 << 20)))
        trace = trace_by_profiler(lambda _span: kept.clear())
        assert (trace.peak_bytes, trace.end_bytes, trace.timeline) == (0, 0, ())
    # Addresses that have been seen are used again by blocks that have not.
    trace_by_profiler(lambda _span: kept.extend(map(torch.empty, range(8, 2048, 8))))
    addresses = {t.data_ptr() for t in kept}
    kept.clear()
    kept.extend(map(torch.empty, range(8, 2048, 8)))
    assert addresses & {t.data_ptr() for t in kept}, "no address was used again"

    def step(_span: Any) -> None:
        kept.clear()
        kept.append(torch.empty(1 << 20))

    trace = trace_by_profiler(step)
    assert (trace.peak_bytes, trace.end_bytes) == (1 << 22, 1 << 22)


def test_it_is_said_that_a_profile_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with torch.autograd.profiler.profile() as seen:
        torch.ones(3).sum()
        trace = trace_memory(lambda _: torch.ones(16), CPU)
        torch.ones(3).prod()
    assert trace.peak_bytes == 64
    assert "seen so far is lost" in caplog.text
    names = {event.name for event in seen.function_events or ()}
    assert "aten::prod" in names
    assert "aten::sum" not in names
    caplog.clear()
    trace_memory(lambda _: trace_memory, CPU)
    assert not caplog.text


_METERED_IN_A_BACKWARD = """
import torch
from rkgb.device.chosen import trace_memory

def names(*spans):
    def run(span):
        for name in spans:
            with span(name):
                torch.ones(4)
    trace = trace_memory(run, torch.device("cpu"))
    return [span.name for span in trace.spans], trace.is_metered

class Meters(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, gradient):
        print(names("inside"))
        return 2 * gradient

def profile():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

with profile() as before:
    Meters.apply(torch.randn(3, requires_grad=True)).sum().backward()
print(names("first", "second", "second"))
with profile() as after:
    torch.ones(3).exp()
print([event.name for event in after.events()].count("aten::exp"))
print([event.name for event in before.events()].count("aten::sum"))
"""


def test_no_profile_is_ended_in_a_backward() -> None:
    """Torch would tell of each later event twice, or call what is gone."""
    command = [sys.executable, "-c", _METERED_IN_A_BACKWARD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    inside, outside, after, before = done.stdout.splitlines()
    assert inside == "(['inside'], False)"
    assert outside == "(['first', 'second', 'second'], True)"
    assert after == before == "1"
    assert "cannot be metered in a backward" in done.stderr


def test_storage_helpers_follow_views() -> None:
    base = torch.zeros(10)
    assert storage_id(base[2:4]) == storage_id(base)
    assert storage_bytes(base[2:4]) == 40


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recording_does_not_depend_on_what_autograd_saves(name: str) -> None:
    """Stand-ins for what was given up lead to the same operations as the real content."""
    assert_recorded_as_it_is(*example(name))


class Attending(nn.Module):
    """Attention by single kernels, some of which return their argument's memory and do not say."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0] + x


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))).transpose(2, 3) + x


class Splitting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.line(x).chunk(3, -1)
        return torch.cat([a.sigmoid() * b, c.flip(0)], -1)[..., 4:12].contiguous().reshape(x.shape)


class Overwriting(nn.Module):
    """Masks are drawn into fresh memory, a half is overwritten, and what was made is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x).add_(1.0)
        noise = torch.empty_like(y).uniform_()
        noise[:, :4].mul_(2.0)
        z = torch.dropout(torch.relu_(y), 0.3, True) * noise.div_(3.0)
        return x + z.sigmoid().bernoulli().mul_(z)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Overwriting, (6, 8)),
        (Attending, (3, 5, 8)),
        (Convolving, (2, 4, 6, 6)),
        (Splitting, (6, 4, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8)),
    ],
)
def test_a_recording_does_not_depend_on_which_kernels_ran(layer: Any, shape: Any) -> None:
    """Of equal layers one is computed; the others lie in memory as they would."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(3)))
    recorded = assert_recorded_as_it_is(model, torch.randn(shape))
    assert recorded.has_repeated


def test_what_is_drawn_again_is_random_though_it_is_not_drawn() -> None:
    model = nn.Sequential(*(nn.Dropout(0.5) for _ in range(3)))
    x = torch.randn(6, 8, requires_grad=True)
    drawn = [op.is_random for op in make_B(model, x).ops if op.target_name == "bernoulli_"]
    assert drawn == [True] * 3


def assert_recorded_as_it_is(model: nn.Module, sample: Any) -> Any:
    stream = RngState.save(CPU)
    recordings = []
    for keep_content in (False, True):
        step = RecordedStep(
            model, Sample.of(model, sample), Asked(), Way(keeps_content=keep_content)
        )
        recordings.append(step.run(None))
        if not keep_content:
            repeated = step.recorder.repeated
        stream.restore()
    short, full = recordings
    assert [str(op) for op in short.ops] == [str(op) for op in full.ops]
    assert [str(op) for op in short.backward] == [str(op) for op in full.backward]
    assert _parts(short) == _parts(full)
    assert short.infos == full.infos
    assert [op.is_random for op in short.ops] == [op.is_random for op in full.ops]
    return repeated


def _parts(basic: Any) -> list[tuple[str, str]]:
    return [(given.leaf, given.value) for given in basic.hand_overs]


class Wide(nn.Module):
    """Layers whose activations are large and whose weights are small."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_a_chain_is_recorded_in_a_quarter_of_the_memory_of_its_step() -> None:
    model, x = Wide(24, 16), torch.randn(4096, 16)

    def plain(_: Any) -> None:
        model(x).backward()

    make_B(model, x)
    model(x).backward()  # what a library allocates once, and the gradients of parameters
    step = trace_memory(plain, CPU).peak_bytes
    recording = trace_memory(lambda _: make_B(model, x), CPU).peak_bytes
    assert step > 2 * 24 * x.nbytes
    assert recording <= step / 4


_SCRIPT = """
import resource, sys
import torch
from torch import nn
from rkgb import make_all_graphs
from rkgb.capture.record import make_B

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def network(layers, width):
    return nn.Sequential(*(Layer(width) for _ in range(layers)), nn.Linear(width, 1))


def data_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))


layers, rows, width, limit = (int(text) for text in sys.argv[1:])
make_all_graphs(network(2, 8), torch.randn(4, 8), cost="flops")  # what is loaded once
model, x = network(layers, width), torch.randn(rows, width)
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, resource.RLIM_INFINITY))
try:
    model(x).sum().backward()
except RuntimeError as error:
    assert "memory" in str(error), error
    print("the step does not fit")
model.zero_grad()
graph = make_B(model, x)
print("recorded", len(graph.hand_overs) == len(list(model.parameters())))
result = make_all_graphs(model, x, cost="flops")
print("measured", len(result.K_graph.compute) > 4 * layers)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_step_of_ten_times_the_memory_is_recorded() -> None:
    """The limit is the operating system's: an allocation above it fails, whoever asks for it."""
    pytest.importorskip("resource", reason="limits of processes are a matter of POSIX")
    layers, rows, width = 96, 4096, 256
    # Every layer keeps its input (of the linear operation) and the result of tanh.
    step_bytes = 2 * layers * rows * width * 4
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    command += [str(number) for number in (layers, rows, width, step_bytes // 10)]
    # A fixed threshold makes glibc give freed tensors back at once, so that the limit counts them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == ["the step does not fit", "recorded True", "measured True"]
