"""Forwards that hand work to other threads: the part that does runs whole."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import Rockmate

Work = Callable[[], Any]


def _thread(works: list[Work]) -> list[Any]:
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        found[place] = works[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Workers:
    """Threads that wait for work."""

    def __init__(self) -> None:
        self.executor, self.pool = ThreadPoolExecutor(1), ThreadPool(1)
        self.todo: queue.Queue[Work | None] = queue.Queue()
        self.done: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()
        self.executor.submit(int).result()

    def _work(self) -> None:
        while (work := self.todo.get()) is not None:
            self.done.put(work())

    def executed(self, works: list[Work]) -> list[Any]:
        return [future.result() for future in [self.executor.submit(work) for work in works]]

    def pooled(self, works: list[Work]) -> list[Any]:
        return self.pool.map(lambda work: work(), works)

    def applied(self, works: list[Work]) -> list[Any]:
        return [self.pool.apply(work) for work in works]

    def queued(self, works: list[Work]) -> list[Any]:
        for work in works:
            self.todo.put(work)
        return [self.done.get() for _ in works]

    def end(self) -> None:
        self.todo.put(None)
        self.thread.join()
        self.executor.shutdown()
        self.pool.close()
        self.pool.join()


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.end()


class Beside(nn.Module):
    """Two layers side by side, and a factor without a gradient."""

    run: Callable[[list[Work]], list[Any]]  # of the class: what it leads to cannot be copied

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach()
        made = type(self).run([lambda: self.a(x), lambda: self.b(x), lambda: own.softmax(-1)])
        y: Tensor = (made[0] + made[1]) * made[2]
        return y


@pytest.mark.parametrize("how", ["thread", "executed", "pooled", "applied", "queued"])
def test_it_trains_as_plain_pytorch_does(
    how: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _thread if how == "thread" else getattr(workers, how)
    monkeypatch.setattr(Beside, "run", staticmethod(run), raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Beside(), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    x = torch.randn(8, 16)
    planned = Rockmate(model, x, "1MiB", cost="flops")
    for inputs in (x, torch.randn(8, 16), torch.randn(8, 16)):
        for module in (planned, twin):
            module.zero_grad()
            module(inputs).square().sum().backward()
        assert_same_gradients(model, twin)
