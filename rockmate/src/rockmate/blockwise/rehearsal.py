"""Whole steps of a model that are run for planning: memory is marked, and the model is restored.

A model that is sharded or spread over processes cannot be copied. So the steps are run on the model
itself, forward and backward, as in training. Gradients, buffers, attributes and random states are
restored afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rkgb.device import Span
from rkgb.elements import flatten
from rkgb.engine import trace_memory
from rkgb.module_state import (
    KeptTensors,
    KeptWrites,
    Lent,
    ParameterPlaces,
    StartOfCall,
    finding_what_changes,
    without_history,
)
from rkgb.run import CompiledStep, StepProgram
from rkgb.safeguards import signals_wait, without_traces
from rkgb.torch_api import (
    gradients_kept,
    operations_unwatched,
    placed_parameters,
    without_hooks_of_leaves,
)
from rockmate.arguments import Call
from rockmate.blockwise.team import Team
from rockmate.comparison.eager import losses_among, seed_backward
from rockmate.runtime.execute import Executor

TURN, END = "turn", "end"


@dataclass(frozen=True, slots=True)
class Mark:
    """The memory at one point of a step, and the peak from there to the next point."""

    name: str
    bytes: int
    next_peak_bytes: int


class Marker:
    """Marks points of a step while its memory is traced; otherwise it does nothing."""

    def __init__(self) -> None:
        self.span: Span | None = None

    def __call__(self, name: str) -> None:
        if self.span is not None:
            with self.span(name):
                pass


def run_step(model: nn.Module, call: Call, device: torch.device) -> None:
    """Run one step and restore what it changes; hooks after gradients are not called."""
    with kept_as_it_is(model, device, call):
        _run(model, call, Marker())


def find_what_changes(model: nn.Module, calls: Sequence[Call], device: torch.device) -> None:
    """Run the forward of each call, so that steps put back what it changes outside of modules.

    A plain step may take more memory than there is. So nothing is saved for a backward, unless the
    forward itself runs one. DDP's models are not looked at: these count on a backward after each
    forward.
    """
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        return
    drops = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _dropped)
    with torch.inference_mode(False), torch.enable_grad():
        for call in calls:
            try:
                _run_forward(model, call, device, drops)
            except _DroppedError:
                _run_forward(model, call, device, contextlib.nullcontext())


class _DroppedError(RuntimeError):
    """A backward has asked for what was not saved."""


def _dropped(_: Any) -> Tensor:
    raise _DroppedError


def _run_forward(
    model: nn.Module,
    call: Call,
    device: torch.device,
    saving: contextlib.AbstractContextManager[Any],
) -> None:
    args, kwargs = call
    with finding_what_changes(model), kept_as_it_is(model, device, call), saving:
        model(*args, **kwargs)


def trace_step(
    model: nn.Module,
    call: Call,
    device: torch.device,
    marker: Marker,
    times: int = 1,
    restore: Callable[[], None] = lambda: None,
) -> tuple[int, tuple[Mark, ...]]:
    """Return the peak of one step above what is in use before it, and its marked points.

    Gradients of parameters exist before the step, as the definition of the budget says. The lowest
    peak of `times` steps counts, because sending threads release tensors a moment late. `restore`
    undoes other changes by a step.
    """

    def run(span: Span) -> None:
        marker.span = span
        try:
            _run(model, call, marker)
        finally:
            marker.span = None

    with kept_as_it_is(model, device, call) as again:
        start, traces = StartOfCall(model, device), []

        def anew() -> None:
            start.restore()  # with other random numbers it might take other branches
            restore()
            again()

        _run(model, call, Marker())  # tells what it writes; now gradients exist
        with operations_unwatched():  # as in training
            anew()
            _run(model, call, Marker())  # libraries and programs take buffers at their first run
            for _ in range(times):
                anew()
                traces.append(trace_memory(run, device))
    trace = min(traces, key=lambda trace: trace.lasting_peak_bytes)
    marks = [Mark(s.name, s.start_bytes, s.next_peak_bytes) for s in trace.spans]
    return trace.lasting_peak_bytes, tuple(marks)


def largest_first(
    model: nn.Module, calls: Sequence[Call], team: Team, device: torch.device
) -> list[Call]:
    """Return the calls with the one of the largest plain step, in any process, first."""
    if len(calls) == 1:
        return list(calls)
    with team.in_step(), torch.inference_mode(False), torch.enable_grad():
        peaks = [trace_step(model, call, device, Marker())[0] for call in calls]
    rows = team.gather(peaks)
    order = sorted(range(len(calls)), key=lambda n: -max(row[n] for row in rows))
    return [calls[n] for n in order]


def _run(model: nn.Module, call: Call, marker: Marker) -> None:
    args, kwargs = call
    marker("begin")
    results = flatten(model(*args, **kwargs))[0]
    marker(TURN)
    wanted = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    del results
    leaves = _leaves(model)
    is_metered = marker.span is not None
    # What Python of a backward changes outside: hooks, and backwards of Functions.
    with contextlib.nullcontext() if is_metered else finding_what_changes(model):
        seed_backward(losses_among(wanted), {*map(id, leaves)})
    del wanted
    marker(END)


# The backward of a program, to which gradients can be sent.
Handing = Generator[list[Tensor], list[Tensor] | None, None]


@contextlib.contextmanager
def kept_as_it_is(
    model: nn.Module, device: torch.device, call: Call
) -> Iterator[Callable[[], None]]:
    """Restore gradients, buffers, what is written of parameters and arguments, and random states.

    A parameter that was given other memory (`p.data = ...`) gets its own back. The function that is
    yielded prepares one more run: it restores the arguments, and copies anew what changes by being
    used.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_wait())
        stack.enter_context(without_history(model))
        start, lent, places = StartOfCall(model, device), Lent(model), ParameterPlaces(model)
        leaves, given = _leaves(model), KeptTensors.given(flatten(call)[0])
        for put_back in (start.restore, lent.end, places.put_back, given.restore_written):
            stack.callback(put_back)

        def again() -> None:
            lent.again()
            given.restore_written()

        with (
            gradients_kept(leaves),
            without_hooks_of_leaves(leaves),
            KeptWrites(placed_parameters(model)),
            without_traces(),
        ):
            yield again


def _leaves(model: nn.Module) -> list[Tensor]:
    """Return the parameters, and the buffers and attributes that get gradients of their own."""
    tables = [(*part._buffers.values(), *vars(part).values()) for part in model.modules()]
    others = [t for table in tables for t in table if isinstance(t, Tensor) and t.requires_grad]
    return [*model.parameters(), *(t for t in others if t.is_leaf)]


@contextlib.contextmanager
def marked(executor: Executor, place: int, marker: Marker) -> Iterator[None]:
    """Mark the beginning and the end of an executor's forward and backward."""
    expected = executor.expected
    compiled = expected.compiled

    def forward(values: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        marker(f"F{place} begins")
        result = compiled.forward(values)
        marker(f"F{place} ends")
        return result

    traced = replace(
        expected, compiled=replace(_marked_backward(compiled, place, marker), forward=forward)
    )
    known = executor.variants[expected.kind]
    executor.expected = executor.variants[expected.kind] = traced
    try:
        yield
    finally:
        executor.expected = executor.variants[expected.kind] = known


def _marked_backward(compiled: CompiledStep, place: int, marker: Marker) -> CompiledStep:
    """Return a step with a marked backward, also where hooks on weights ask for another one."""

    def backward(saved: list[Any], tangents: list[Tensor], *more: Any) -> Handing:
        marker(f"B{place} begins")
        yield from compiled.backward(saved, tangents, *more)

    def other(program: StepProgram) -> CompiledStep:
        return _marked_backward(compiled.other(program), place, marker)

    last = len(compiled.program.gives) - 1
    ending = _ending(backward, last, f"B{place} ends", marker)
    return replace(compiled, backward=ending, other=other)


def _ending(
    backward: Callable[..., Handing], last: int, name: str, marker: Marker
) -> Callable[..., Handing]:
    """Return a backward that also marks its last gradients."""

    def wrapped(saved: list[Any], tangents: list[Tensor], *more: Any) -> Handing:
        running, number, received = backward(saved, tangents, *more), 0, None
        while True:
            try:
                given = running.send(received)
            except StopIteration:
                return
            if number == last:
                marker(name)
            number += 1
            received = yield given
            del given

    return wrapped
