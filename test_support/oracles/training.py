"""Training through a planned module held against plain PyTorch: every bit and every byte."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device import RngState
from rkgb.elements import flatten
from rkgb.engine import bind_inputs, trace_memory


def loss_of(result: Any) -> Tensor:
    """Return a scalar to run backward from: the result's own loss, or a sum over its tensors."""
    if isinstance(result, Tensor) and result.dim() == 0:
        return result
    if getattr(result, "loss", None) is not None:
        loss: Tensor = result.loss
        return loss
    tensors = [t for t in flatten(result)[0] if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.abs().square().mean() for t in tensors]).sum()


def assert_same_gradients(first: nn.Module, second: nn.Module) -> None:
    """Compare the gradients of two copies of a module bit for bit.

    Raises:
        AssertionError: one differs, only one of two is there, or none is there at all.
    """
    found = 0
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), f"only one gradient of {name} is there"
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), f"the gradients of {name} differ"
            found += 1
    assert found, "no parameter has a gradient"


def assert_trains_like(
    wrapped: nn.Module,
    twin: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    steps: int = 3,
) -> None:
    """Train both for some steps, never reseeding in between, and compare every bit.

    `twin` is an eager copy of the module inside `wrapped`, made before its first step.

    Raises:
        AssertionError: an output, gradient, buffer, parameter or the random state differs.
    """
    args, keywords = bind_inputs(sample, kwargs)
    place = next((p.device for p in twin.parameters()), torch.device("cpu"))

    def train(model: nn.Module) -> list[dict[str, Any]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen = []
        for _ in range(steps):
            optimizer.zero_grad()
            result = model(*args, **keywords)
            with warnings.catch_warnings():  # they are held, to be compared
                warnings.filterwarnings("ignore", "outputs of .* beside its loss")
                loss_of(result).backward()
            record: dict[str, Any] = {
                f"output {i}": leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
                for i, leaf in enumerate(flatten(result)[0])
            }
            record["type"] = type(result)
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                record[f"gradient of {name}"] = None if grad is None else grad.clone()
            record.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
            stream = RngState.save(place)
            record["random state"], record["device's"] = stream.cpu, stream.own
            optimizer.step()
            record.update(
                {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
            )
            seen.append(record)
        return seen

    start = RngState.save(place)
    expected = train(twin)
    start.restore()
    found = train(wrapped)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert list(ours) == list(theirs), "the two modules have other names"
        for name, value in theirs.items():
            same = (
                isinstance(ours[name], Tensor) and torch.equal(ours[name], value)
                if isinstance(value, Tensor)
                else ours[name] is value or ours[name] == value
            )
            assert same, f"step {step}: {name} differs from eager's"


def measured_peak_bytes(
    model: nn.Module, sample: Any, *, kwargs: Mapping[str, Any] | None = None, grads_exist: bool
) -> int:
    """Return the allocator's peak of one step above its start, by the design's definition.

    With `grads_exist` the gradients are there before the step and accumulated into; without, they
    are made during the step, and their size is taken off.
    """
    args, keywords = bind_inputs(sample, kwargs)

    def step(_span: Any = None) -> None:
        loss_of(model(*args, **keywords)).backward()

    step()
    model.zero_grad(set_to_none=not grads_exist)
    gc.collect(1)  # a full one takes 0.2 s in a program with a few libraries
    made = 0 if grads_exist else _gradient_bytes(model)
    return trace_memory(step, next(model.parameters()).device).peak_bytes - made


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def eager_copy(model: nn.Module) -> nn.Module:
    """Return an independent copy, to be trained without Rockmate."""
    return copy.deepcopy(model)
