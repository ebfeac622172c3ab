"""On a GPU: what moves to pinned memory keeps bits and bytes, however late the copies are."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.program_memory import SaidMemory
from rkgb.copies import Pinned, measured_link
from rkgb.device.chosen import device_of, trace_memory
from rkgb.device.queues import CopyQueues, Queue
from rkgb.run.program.lowering import lower_step
from rkgb.torch_api.private.memory import keep_cuda_busy
from runs.moves import Layers, MovingStep, drawn_moves, moves_to_the_backward, steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


class LateQueues(CopyQueues):
    """Each copy begins some milliseconds late; pinned pages are counted."""

    def __init__(self, where: torch.device, draw: random.Random) -> None:
        super().__init__(where)
        self._draw, self.pinned = draw, dict[int, int]()

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        assert isinstance(queue, torch.cuda.Stream)
        with torch.cuda.stream(queue):
            keep_cuda_busy(self._draw.choice((1, 1 << 20, 1 << 23)))
        super().copy(queue, target, source)

    def pin(self, address: int, size_bytes: int) -> None:
        super().pin(address, size_bytes)
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        super().unpin(address)
        del self.pinned[address]


@pytest.fixture
def step() -> MovingStep:
    where = torch.device("cuda", torch.cuda.current_device())
    device_of(where).warm_up()
    torch.manual_seed(0)
    return MovingStep(Layers(6, 64).to(where), torch.randn(4096, 64, device=where))


@pytest.mark.parametrize("seed", range(6))
def test_bits_and_requested_bytes_are_as_without_delays(step: MovingStep, seed: int) -> None:
    draw = random.Random(seed)
    steps = steps_of(step.graph, draw)
    kept = lower_step(step.graph, steps)
    moved = lower_step(step.graph, steps, moves=drawn_moves(step.graph, steps, draw))
    copies = Pinned(LateQueues(step.x.device, draw))
    step.compile(kept, copies)
    expected = step.gradients(step.forward()[1])
    step.compile(moved, copies)
    for _ in range(3):
        found = step.gradients(step.forward()[1])
        assert all(map(torch.equal, found, expected))
    del found, expected
    tangent = torch.ones_like(step.x)

    def run(span: Any) -> None:
        with span("forward"):
            outputs, saved = step.forward()
        outputs.clear()
        with span("backward"):
            for gradients in step.backward(saved, tangent):
                gradients.clear()

    forward, backward = trace_memory(run, step.x.device).spans
    measured = forward.peak_bytes, forward.end_bytes, backward.peak_bytes
    assert measured == SaidMemory(step.graph, moved).peaks()


def test_pinned_memory_has_the_exact_size_and_goes_with_its_last_user(step: MovingStep) -> None:
    queues = LateQueues(step.x.device, random.Random(0))
    moves = moves_to_the_backward(step.graph, step.steps)
    program = lower_step(step.graph, step.steps, moves=moves)
    step.compile(program, Pinned(queues))
    for _ in range(3):
        step.gradients(step.forward()[1])
        assert [*queues.pinned.values()] == [program.arena_bytes]
    running = step.backward(step.forward()[1], torch.ones_like(step.x))
    next(running).clear()
    running.close()  # in the middle, with copies under way
    step.compile(lower_step(step.graph, step.steps), Pinned(queues))
    gc.collect()
    assert not queues.pinned


def test_the_host_goes_on_while_copies_wait(step: MovingStep) -> None:
    """When a step has been given to the device, its last copy has not begun."""

    class Long(CopyQueues):
        def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
            assert isinstance(queue, torch.cuda.Stream)
            with torch.cuda.stream(queue):
                keep_cuda_busy(1 << 26)
            super().copy(queue, target, source)

    copies = Pinned(Long(step.x.device))
    moves = moves_to_the_backward(step.graph, step.steps)
    step.compile(lower_step(step.graph, step.steps, moves=moves), copies)
    step.gradients(step.forward()[1])
    torch.cuda.synchronize()
    saved = step.forward()[1]
    assert not copies._out.query()  # type: ignore[attr-defined]
    step.gradients(saved)
    assert not copies._back.query()  # type: ignore[attr-defined]
    torch.cuda.synchronize()


def test_a_link_of_pinned_memory_is_measured(step: MovingStep) -> None:
    found = measured_link(Pinned(CopyQueues(step.x.device)), step.x.device)
    assert min(found.out_bytes_per_ms, found.in_bytes_per_ms, found.latency_ms) > 0
