"""Sections about plans: as users make them, budgets against peaks, node times, short memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from probe.machine import Machine, Ready, Row, apart, fresh, seconds_of
from rkgb.torch_api import with_flags
from rockmate import InfeasibleBudgetError, Rockmate

_DETERMINISTIC = (("deterministic", (True, True)), ("cudnn.deterministic", True))


def as_users(machine: Machine) -> Iterator[Row]:
    """`Rockmate(model, sample, 0.6)` with nothing set: the first error that a user would see."""
    cells = (("gpt2", "bf16", 0.6), ("gpt2", "amp", 0.6), ("resnet50", "fp32", 0.4))
    for name, kind, budget in cells[:1] if machine.tiny else cells:
        yield _planned_row(machine, name, kind, budget, self_test=True)


def matrix(machine: Machine) -> Iterator[Row]:
    """Networks x budgets: predicted and measured peaks, gradients, times, planning's own memory."""
    cells = [("gpt2", "bf16"), ("gpt2", "fp32"), ("resnet50", "fp32"), ("unet", "fp32")]
    for name, kind in cells[-1:] if machine.tiny else cells:
        for budget in (0.7,) if machine.tiny else (0.9, 0.7, 0.5, "least"):
            yield _planned_row(machine, name, kind, budget, self_test=False)


def whole_steps(machine: Machine) -> Iterator[Row]:
    """`memory=`: all that whole steps hold of the device, its context and what is reserved."""
    for name in ("SGD", "AdamW"):
        ready = machine.network("gpt2")
        optimizer = getattr(torch.optim, name)(ready.model.parameters(), lr=1e-4)
        within: dict[str, Any] = {"optimizer": optimizer, "cost": "flops", "self_test": False}
        memory_bytes = 1000
        try:
            Rockmate(ready.model, ready.sample, memory=memory_bytes, **within)
        except InfeasibleBudgetError as error:
            memory_bytes = int(1.1 * error.minimum_bytes)
        module = Rockmate(ready.model, ready.sample, memory=memory_bytes, **within)

        def step(
            ready: Ready = ready, module: nn.Module = module, optimizer: Any = optimizer
        ) -> None:
            ready.step(module)
            optimizer.step()
            optimizer.zero_grad()

        held = [machine.held_by(step, module, optimizer, ready.sample) for _ in range(3)]
        parts = {part.name: part.size_bytes for part in module.memory.parts}
        used = {"budget_bytes": memory_bytes, "allocated_bytes": max(held)}
        yield {"optimizer": name, **used, "planned_bytes": module.plan.peak_bytes, **parts}


def _planned_row(machine: Machine, name: str, kind: str, budget: Any, *, self_test: bool) -> Row:
    row: Row = {"network": name, "kind": kind, "budget": budget, "self_test": self_test}
    try:
        with torch.backends.cudnn.flags(deterministic=True), with_flags(_DETERMINISTIC):
            if not self_test:
                return {**row, **_figures(machine, machine.network(name, kind), budget, False)}
        return {**row, **_figures(machine, machine.network(name, kind), budget, True)}
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {str(error)[:400]}"}
    finally:
        gc.collect()
        if machine.is_cuda:
            torch.cuda.empty_cache()


def _figures(machine: Machine, ready: Ready, budget: Any, self_test: bool) -> Row:
    twin = fresh(ready.model)
    before = machine.counters()
    made: list[Rockmate] = []

    def plan(least: int | None = None) -> None:
        asked = least if least is not None else 0.5 if budget == "least" else budget
        with ready.region():
            made.append(Rockmate(ready.model, ready.sample, asked, self_test=self_test))

    def within() -> None:
        try:
            plan(1000 if budget == "least" else None)
        except InfeasibleBudgetError as error:
            plan(int(error.minimum_bytes * 1.02))

    planning_peak, seconds = seconds_of(lambda: machine.peak_of_planning(within))
    module = made[0]
    parameters = sum(p.nbytes for p in ready.model.parameters())
    after = machine.counters()
    ours, theirs = ready.gradients(module), ready.gradients(twin)
    with ready.with_gradients(module):
        peaks = [machine.peak(lambda: ready.step(module)) for _ in range(3)]
    step_ms, step_host = machine.milliseconds(lambda: ready.step(module))
    eager_ms, eager_host = machine.milliseconds(lambda: ready.step(twin))
    return {
        "budget_bytes": module.budget_bytes,
        "predicted_bytes": module.plan.peak_bytes,
        "asked_bytes": max(asked for asked, _ in peaks),
        "allocated_bytes": max(allocated for _, allocated in peaks),
        **{f"kept_{key}": after[key] - before[key] for key in after},
        **apart(theirs, ours),
        "planned_overhead": module.plan.overhead,
        "step_ms": step_ms,
        "step_host_ms": step_host,
        "eager_ms": eager_ms,
        "eager_host_ms": eager_host,
        "planning_s": seconds,
        "planning_peak_bytes": planning_peak,
        "parameter_bytes": parameters,
    }


def node_times(machine: Machine) -> Iterator[Row]:
    """Times of nodes added up, beside the step: how far planning's figures are from its aim."""
    name, kind = ("gpt2" if machine.tiny else "gpt2-medium"), "bf16"
    ready = machine.network(name, kind)
    ready.step()
    eager_ms, host_ms = machine.milliseconds(lambda: ready.step())
    module = Rockmate(ready.model, ready.sample, 0.6, self_test=False)
    problem = module.plan.problem
    nodes = problem.base_time_ms
    step_ms, step_host_ms = machine.milliseconds(lambda: ready.step(module))
    yield {
        "network": name,
        "nodes_ms": nodes,
        "eager_ms": eager_ms,
        "eager_host_ms": host_ms,
        "planned_ms": nodes * (1 + module.plan.overhead),
        "step_ms": step_ms,
        "step_host_ms": step_host_ms,
    }


def ballast(machine: Machine) -> Iterator[Row]:
    """Little memory is left: the eager step does not fit, and planning must not need it."""
    if not machine.is_cuda:
        yield {"skipped": "a CPU has no memory of its own to fill"}
        return
    ready = machine.network("gpt2", "bf16")
    peak, _ = machine.peak(ready.step)
    parameters = sum(p.nbytes for p in ready.model.parameters())
    for parameter in ready.model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(machine.device)
    size = free - int(0.8 * peak) - 2 * parameters
    filled = torch.empty(max(0, size), dtype=torch.uint8, device=machine.device)
    for self_test in (True, False):
        before = machine.counters()
        row: Row = {"self_test": self_test, "eager_peak_bytes": peak, "ballast_bytes": size}
        try:
            module = Rockmate(ready.model, ready.sample, int(0.5 * peak), self_test=self_test)
            after = machine.counters()
            ready.step(module)
            row |= {f"kept_{key}": after[key] - before[key] for key in after}
            row["eager_was_run"] = module.eager_peak_bytes is not None
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row
    del filled


def features(machine: Machine) -> Iterator[Row]:
    """Kernels chosen around the forward, a side stream, graph capture, inputs of a second kind."""
    ready = machine.network("gpt2", "bf16")
    twin = fresh(ready.model)
    module = Rockmate(ready.model, ready.sample, 0.9, self_test=False, effort="fast")
    with sdpa_kernel(SDPBackend.MATH):
        ours, theirs = ready.gradients(module), ready.gradients(twin)
    yield {"feature": "math attention around the forward", **apart(theirs, ours)}
    yield {"feature": "second kind of input", **_second_kind(module, ready)}
    if machine.is_cuda:
        yield {"feature": "side stream", **_on_a_side_stream(machine, ready, module, twin)}
        yield {"feature": "graph capture", **_captured(machine)}


def _second_kind(module: nn.Module, ready: Ready) -> Row:
    smaller = tuple(tensor[:1] for tensor in ready.sample)
    module(*smaller).backward()
    gc.collect()
    gc.disable()
    try:
        alive = []
        for sample in (ready.sample, smaller) * 5:
            loss = module(*sample)
            loss.backward()
            alive.append(weakref.ref(loss))
            del loss
        return {"alive": sum(reference() is not None for reference in alive)}
    finally:
        gc.enable()


def _on_a_side_stream(machine: Machine, ready: Ready, module: nn.Module, twin: nn.Module) -> Row:
    stream = torch.cuda.Stream(machine.device)
    found = []
    for owner in (twin, module):
        stream.wait_stream(torch.cuda.current_stream(machine.device))
        with torch.cuda.stream(stream):
            found.append(ready.gradients(owner))
        torch.cuda.current_stream(machine.device).wait_stream(stream)
    return apart(*found)


def _captured(machine: Machine) -> Row:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers).to(machine.device)
    x = torch.randn(512, 256, device=machine.device)
    module = Rockmate(model, x, 0.7, self_test=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stream = torch.cuda.Stream(machine.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(stream))
        for _ in range(3):
            module(x).square().mean().backward()
    torch.cuda.synchronize(machine.device)
    graph = torch.cuda.CUDAGraph()
    try:
        for parameter in model.parameters():
            parameter.grad.zero_()
        with torch.cuda.graph(graph):
            module(x).square().mean().backward()
        graph.replay()
        torch.cuda.synchronize(machine.device)
        return {"captured": True}
    except Exception as error:
        return {"captured": False, "error": f"{type(error).__name__}: {str(error)[:200]}"}
