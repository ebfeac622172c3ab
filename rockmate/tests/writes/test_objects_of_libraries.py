"""Modules, classes and objects of libraries that a forward changes or reads, as in plain."""

from __future__ import annotations

import argparse
import configparser
import contextlib
import json
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate

logger = logging.getLogger("of a library")
arguments = argparse.Namespace(count=0)
encoder: Any = json.JSONEncoder()
parser = configparser.ConfigParser()
semaphore: Any = threading.Semaphore(100)
stack: Any = contextlib.ExitStack()
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
libraries: Any = torch, json, nn.Linear, torch.nn.functional  # what a test gives attributes to
torch_, json_, linear, functional = libraries


def _of_torch(_: Any) -> None:
    torch_.seen_so_far = getattr(torch_, "seen_so_far", 0) + 1


def _of_python(_: Any) -> None:
    json_.seen_so_far = getattr(json_, "seen_so_far", 0) + 1


def _of_class(_: Any) -> None:
    linear.seen_so_far = getattr(linear, "seen_so_far", 0) + 1


def _by_name(_: Any) -> None:
    setattr(torch_, "seen_so_far", getattr(torch_, "seen_so_far", 0) + 1)  # noqa: B010


def _in_its_variables(_: Any) -> None:
    functional.__dict__["seen_so_far"] = functional.__dict__.get("seen_so_far", 0) + 1


def _of_arguments(_: Any) -> None:
    arguments.count += 1


def _of_own_arguments(module: Any) -> None:
    module.arguments.count += 1


def _of_object(_: Any) -> None:
    encoder.seen_so_far = getattr(encoder, "seen_so_far", 0) + 1


def _of_logger(_: Any) -> None:
    logger.setLevel(logger.level + 1)


def _of_parser(_: Any) -> None:
    parser.add_section(str(len(parser.sections())))


def _of_semaphore(_: Any) -> None:
    semaphore.acquire()


def _of_stack(_: Any) -> None:
    stack.callback(int)


def _of_schedule(_: Any) -> None:
    schedule.step()


# What a step changes, and how often it was changed so far.
CHANGES: dict[Callable[[Any], None], Callable[[Any], int]] = {
    _of_torch: lambda _: getattr(torch_, "seen_so_far", 0),
    _of_python: lambda _: getattr(json_, "seen_so_far", 0),
    _of_class: lambda _: getattr(linear, "seen_so_far", 0),
    _by_name: lambda _: getattr(torch_, "seen_so_far", 0),
    _in_its_variables: lambda _: getattr(functional, "seen_so_far", 0),
    _of_arguments: lambda _: arguments.count,
    _of_own_arguments: lambda module: module.arguments.count,
    _of_object: lambda _: getattr(encoder, "seen_so_far", 0),
    _of_logger: lambda _: logger.level,
    _of_parser: lambda _: len(parser.sections()),
    _of_semaphore: lambda _: 100 - semaphore._value,
    _of_stack: lambda _: len(stack._exit_callbacks),
    _of_schedule: lambda _: schedule.last_epoch,
}


@pytest.fixture(autouse=True)
def _without_attributes() -> Any:
    yield
    for owner in libraries:
        if hasattr(owner, "seen_so_far"):
            del owner.seen_so_far


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.change, self.arguments = change, argparse.Namespace(count=0)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        y: Tensor = self.body(x)
        return y


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("change", CHANGES)
def test_every_step_changes_it_once_and_planning_does_not(change: Callable[[Any], None]) -> None:
    module, count = Changing(change), CHANGES[change]
    before = count(module)
    rk = Rockmate(module, torch.randn(8, 16), 1 << 20, cost="flops", progress=False)
    for number in range(4):
        assert count(module) == before + number
        rk(torch.randn(8, 16)).square().mean().backward()
    assert count(module) == before + 4


def test_what_is_set_and_not_read_is_set_by_every_step() -> None:
    def keep(module: Any) -> None:
        torch_.seen_so_far = module.training

    rk = Rockmate(Changing(keep), torch.randn(8, 16), 1 << 20, cost="flops", progress=False)
    assert not hasattr(torch, "seen_so_far")
    for _ in range(4):
        rk(torch.randn(8, 16)).square().mean().backward()
        assert torch_.seen_so_far
        del torch_.seen_so_far


class Set(Changing):
    def forward(self, x: Tensor) -> Tensor:
        event.set()
        y: Tensor = self.body(x)
        return y


event = threading.Event()


def test_an_event_is_set_by_every_step() -> None:
    rk = Rockmate(Set(lambda _: None), torch.randn(8, 16), 1 << 20, cost="flops", progress=False)
    for _ in range(4):
        assert not event.is_set()
        rk(torch.randn(8, 16)).square().mean().backward()
        assert event.is_set()
        event.clear()


class Thing:
    """Something that may die."""


class Watches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.thing = nn.Linear(4, 4), Thing()
        self.end = weakref.finalize(self.thing, int)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.tanh() if self.end.alive else y.sigmoid()


def test_a_finalizer_of_what_lives_is_alive() -> None:
    model = Watches()
    rk = Rockmate(model, torch.randn(2, 4), 1 << 20, cost="flops", progress=False)
    x = torch.randn(2, 4)
    assert torch.equal(rk(x), model.layer(x).tanh())


scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0)
data = torch.utils.data.TensorDataset(torch.zeros(1))
loader = torch.utils.data.DataLoader(data)
child = logging.getLogger("of a library.child")


def _set_data(number: int) -> None:
    data.tensors = (torch.zeros(number),)


# What a forward reads by methods and functions of libraries, and what changes it.
READS: dict[str, tuple[Callable[[], float], Callable[[int], Any]]] = {
    "schedule": (lambda: schedule.get_last_lr()[0], lambda _: schedule.step()),
    "scale": (scaler.get_scale, lambda n: setattr(scaler, "_init_scale", float(n))),
    "interval": (scaler.get_growth_interval, scaler.set_growth_interval),
    "data": (lambda: float(len(data)), _set_data),
    "loader": (lambda: float(len(loader)), _set_data),
    "parser": (
        lambda: parser.getint("DEFAULT", "scale", fallback=1),
        lambda n: parser.set("DEFAULT", "scale", str(n)),
    ),
    "semaphore": (lambda: semaphore._value, lambda _: semaphore.acquire()),
    "logger": (lambda: 1 + child.isEnabledFor(15), lambda n: logger.setLevel(10 * (n % 2 + 1))),
    "any logger": (lambda: 1 + child.isEnabledFor(35), lambda n: logging.disable(40 * (n % 2))),
    "root logger": (
        lambda: logging.getLogger().getEffectiveLevel(),
        lambda n: logging.getLogger().setLevel(30 + n),
    ),
    "printing": (
        lambda: np.get_printoptions()["precision"],
        lambda n: np.set_printoptions(precision=n),
    ),
}


@pytest.fixture
def _with_logging_as_it_was() -> Any:
    level = logging.getLogger().level
    with np.printoptions():
        yield
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(level)


class Reading(nn.Module):
    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * self.read()
        return y


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.usefixtures("_with_logging_as_it_was")
@pytest.mark.parametrize("name", READS)
def test_what_their_methods_read_is_looked_at_in_every_step(name: str) -> None:
    read, change = READS[name]
    module = Reading(read)
    rk = Rockmate(module, torch.randn(8, 16), 1 << 20, cost="flops", progress=False)
    for number in range(6):
        x = torch.randn(8, 16)
        assert torch.equal(rk(x), module(x))
        if number >= 2:  # the second step has been compared with the recording
            change(number)
