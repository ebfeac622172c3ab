"""What one run of a case shows: everything that a user could look at, event by event."""

from __future__ import annotations

import contextlib
import enum
import gc
import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rkgb.engine import device_of, trace_memory

TOLD_ONCE = "were planned for it"  # a part that runs whole holds more than in the sample's step
MORE_STEPS = 6
LOSS_BYTES = 16  # a scalar that is no part of the module, and its gradient
Fact = Any  # a tensor, a plain value, or a tuple of facts


@dataclass
class Page:
    """One event: what was seen in it and after it, and the error that ended it."""

    name: str
    facts: dict[str, Fact] = field(default_factory=dict)
    error: Exception | None = None


@dataclass
class Peak:
    """Bytes of one step above its start, and what was allowed; `said` are warnings of ours."""

    page: str
    peak_bytes: int
    budget_bytes: int
    said: tuple[str, ...]


class Journal:
    """Keeps the pages of a run. `space` are the globals of the script, `said` its warnings."""

    def __init__(self, space: dict[str, Any], said: list[str], *, planned: bool) -> None:
        self.space, self.said, self.planned = space, said, planned
        self.pages: list[Page] = []
        self.peaks: list[Peak] = []
        self.kept_bytes: dict[str, int] = {}  # by some more steps, by event

    @contextlib.contextmanager
    def event(self, name: str, model: nn.Module) -> Iterator[None]:
        """Note what the event leaves, and the error that it ends with; errors end no run."""
        page = Page(name)
        self.pages.append(page)
        try:
            yield
        except Exception as error:
            page.error = error
            with contextlib.suppress(Exception):
                model.zero_grad()  # where an error ends a backward, nobody uses half a gradient
        page.facts.update(self._state(model))

    def outputs(self, result: Any) -> list[Tensor]:
        """Note what a call has returned; give its tensors."""
        found = self.tensors(result)
        self.add("outputs", result)
        self.add("outputs require gradients", [out.requires_grad for out in found])
        return found

    def tensors(self, result: Any) -> list[Tensor]:
        """Return the tensors of what a module returns."""
        if isinstance(result, Tensor):
            return [result]
        values = result.values() if isinstance(result, dict) else result
        return [tensor for value in values for tensor in self.tensors(value)]

    def held(self, result: Any) -> list[Tensor]:
        """Return the tensors that a loop holds through a backward from the first one.

        Of a loss beside other outputs only the losses: who holds the others, too, takes their bytes
        on top of the budget (docs/how-to/budget.md).
        """
        found = self.tensors(result)
        return [out for out in found if not out.dim()] if not found[0].dim() else found

    def add(self, name: str, value: Any) -> None:
        """Note one thing that the loop has seen."""
        facts = self.pages[-1].facts
        facts[f"{name} ({len(facts)})"] = fact(value)

    def peak(self, step: Callable[[], object], model: Any) -> None:
        """Run a step three times; where it is planned, note how many bytes the third one takes.

        The first one may plan, which takes bytes of its own. The second one is traced, so that the
        profiler knows what it leaves, and sees the third one free that. What hooks on parameters
        take is nobody's promise. Some more steps show how many bytes stay.
        """
        step()
        trace_memory(lambda span: step(), torch.get_default_device())
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = None  # adding to it makes another one, which is larger each time
        self._third(step, model)
        gc.collect()
        memory = trace_memory(lambda span: _some(step), torch.get_default_device())
        self.kept_bytes[self.pages[-1].name] = max(0, memory.end_bytes)

    def _third(self, step: Callable[[], object], model: Any) -> None:
        if not self.planned or any(p._backward_hooks for p in model.parameters()):
            step()
            return
        gc.collect()
        before, said = _gradient_bytes(model), len(self.said)
        memory = trace_memory(lambda span: step(), torch.get_default_device())
        made = _gradient_bytes(model) - before
        peak = Peak(
            self.pages[-1].name,
            memory.peak_bytes - made - LOSS_BYTES,
            vars(model).get("_budget_bytes") or model.budget_bytes,  # of blocks, or of all
            (*(text for text in self.said[:said] if TOLD_ONCE in text), *self.said[said:]),
        )
        self.peaks.append(peak)

    def failed(self) -> bool:
        """Whether any event has ended in an error."""
        return any(page.error is not None for page in self.pages)

    def _state(self, model: nn.Module) -> dict[str, Fact]:
        facts: dict[str, Fact] = {}
        for name, parameter in model.named_parameters():
            facts[f"parameter {name}"] = fact(parameter)
            facts[f"gradient of {name}"] = fact(parameter.grad)
        for name, buffer in model.named_buffers():
            facts[f"buffer {name}"] = fact(buffer)
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if not name.startswith("_"):
                    facts[f"attribute {path}.{name}"] = fact(value)
                    if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                        facts[f"grad of attribute {path}.{name}"] = fact(_grad_of(value))
        for name, value in self.space.items():
            if name.isupper() or name.rstrip("0123456789_").isupper():
                facts[f"global {name}"] = fact(value)
                if isinstance(value, Tensor):
                    facts[f"gradient of global {name}"] = fact(value.grad)
        facts["random state of torch"] = torch.get_rng_state()
        facts["random state of the device"] = device_of(torch.get_default_device()).random_state()
        facts["random state of Python"] = hash(random.getstate())
        facts["random state of numpy"] = hashlib.sha1(pickle.dumps(np.random.get_state())).digest()
        facts["grad mode"] = torch.is_grad_enabled()
        facts["autocast"] = torch.is_autocast_enabled(torch.get_default_device().type)
        return facts


def fact(value: Any, depth: int = 3) -> Fact:
    """Return what can be compared later, when the value itself has changed."""
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.to_dense() if value.is_sparse else value).clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, enum.Enum)):
        return str(value)
    if isinstance(value, (list, tuple)) and depth:
        return type(value).__name__, *(fact(part, depth - 1) for part in value)
    if isinstance(value, dict) and depth:
        return "dict", *((str(key), fact(part, depth - 1)) for key, part in value.items())
    return f"a {type(value).__name__}"


def same(first: Fact, second: Fact) -> bool:
    """Whether two facts have the same bits; not a number equals itself."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        if torch.equal(first, second):
            return True
        return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and bool(first == second or first != first)


def _some(step: Callable[[], object]) -> None:
    for _ in range(MORE_STEPS):
        step()
    gc.collect()


def _grad_of(value: Tensor) -> Tensor | None:
    return value.grad if value.retains_grad else None


def _gradient_bytes(model: nn.Module) -> int:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [(g._indices(), g._values()) if g.is_sparse else (g,) for g in grads]
    return sum(part.untyped_storage().nbytes() for own in parts for part in own)
