"""What a forward may change in Python: attributes of modules, and Python's random numbers."""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device.rng import RngState

CONTAINERS = (list, dict, set, deque)


class PythonRandom:
    """The state of Python's random numbers, and of numpy's where it is loaded."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = numpy_state()

    def restore(self) -> None:
        """Put both states back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class ModuleState:
    """The attributes of every module of a model as they were, shallow copies of containers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [
            (path, module, dict(vars(module))) for path, module in model.named_modules()
        ]
        self.contents = [
            (value, content_of(value))
            for _, _, attributes in self.modules
            for value in attributes.values()
            if isinstance(value, CONTAINERS)
        ]
        self.random = PythonRandom()

    def restore(self) -> None:
        """Put every attribute, and what is in the containers among them, back."""
        self.random.restore()
        for _, module, before in self.modules:
            now = vars(module)
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if now.get(name) is not value:
                    now[name] = value
        for container, content in self.contents:
            if not same_content(content_of(container), content):
                container.clear()
                if isinstance(container, (dict, set)):
                    container.update(content)
                else:
                    container.extend(content)


class BufferContents:
    """What is in the buffers of a module, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self.copies = [(b, b.detach().clone()) for b in module.buffers()]

    def restore(self) -> None:
        """Put the content back where it has changed."""
        with torch.no_grad():
            for buffer, copy in self.copies:
                buffer.copy_(copy)

    def changed(self) -> bool:
        """Whether any buffer holds something else now."""
        return not all(_same(buffer, copy) for buffer, copy in self.copies)


class StartOfCall:
    """What a call of a model finds, to be found again by another one in its place."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.stream = RngState.save(device)
        self.state = ModuleState(model)
        self.buffers = BufferContents(model)

    def restore(self) -> None:
        """Put random numbers, attributes and buffers back."""
        self.stream.restore()
        self.state.restore()
        self.buffers.restore()


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b) or ((a == b) | (a != a)).all())


def numpy_state() -> Any:
    """Return the state of numpy's random numbers; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")  # where it is not loaded, nothing draws from it
    return numpy.random.get_state() if numpy is not None else None


def content_of(container: Any) -> Any:
    """Return a shallow copy of a container, to compare with later."""
    return dict(container) if isinstance(container, dict) else list(container)


def same_content(a: Any, b: Any) -> bool:
    """Whether two contents hold the same objects in the same places."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(value is b[key] for key, value in a.items())
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
