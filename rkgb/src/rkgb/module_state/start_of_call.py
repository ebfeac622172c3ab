"""What a forward may change in Python: attributes of modules, and Python's random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device.rng import KeptGenerators
from rkgb.guards.contents import CONTAINERS, Contents, content_of, is_used_up, put_back
from rkgb.guards.outside import OutsideState
from rkgb.torch_api.torch_private import set_version


class PythonRandom:
    """The state of Python's random numbers, of numpy's where it is loaded, and of what is outside.

    Outside of modules are the places that forwards were seen to change (`OutsideState`).
    """

    def __init__(self, *, lends: bool = False) -> None:
        self.python = random.getstate()
        self.numpy = numpy_state()
        self.outside = OutsideState(lends=lends)
        self._leaves = False

    def leave(self) -> None:
        """Leave random numbers as they are: another thread draws them."""
        self._leaves = True

    def restore(self) -> None:
        """Put these states back."""
        self.outside.restore()
        if self._leaves:
            return
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
            put_back(container, content)


class Lent:
    """Copies of what changes by being used, in the places of a module and outside: for one run."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (vars(part), name)
            for part in module.modules()
            for name, value in vars(part).items()
            if is_used_up(value)
        ]
        self._lend()

    def again(self) -> None:
        """Lend other copies, for another run."""
        self.end()
        self._lend()

    def end(self) -> None:
        """Put back what was there."""
        self._outside.restore()
        self._contents.restore()

    def _lend(self) -> None:
        self._contents, self._outside = Contents(), OutsideState(lends=True)
        for table, name in self._places:
            self._contents.add(table, name)


class BufferContents:
    """What is in the buffers of a module, and in others of its tensors, to be put back."""

    def __init__(self, of: nn.Module | Iterable[Tensor], others: Iterable[Tensor] = ()) -> None:
        buffers = of.buffers() if isinstance(of, nn.Module) else of
        self.copies = [(b, b.detach().clone()) for b in (*buffers, *others)]
        self._versions = [(b, b._version) for b, _ in self.copies if not b.is_inference()]

    def restore(self) -> None:
        """Put the content back where it has changed."""
        with torch.no_grad():
            for buffer, copy in self.copies:
                buffer.copy_(copy)

    def undo(self) -> None:
        """Put the content back as if it had never changed, for graphs that were there before."""
        self.restore()
        for buffer, version in self._versions:
            set_version(buffer, version)

    def changed(self) -> bool:
        """Whether any buffer holds something else now."""
        return not all(_same(buffer, copy) for buffer, copy in self.copies)


class StartOfCall:
    """What a call of a model finds, to be found again by another one in its place.

    Where it is known which buffers the call `writes` to, nothing is copied of others.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        written: Iterable[str] = (),
        writes: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.stream = KeptGenerators.keep(device)
        self.state = ModuleState(model)
        every = list(model.named_buffers(remove_duplicate=False))
        copied = [b for name, b in every if writes(name)]
        self.buffers = BufferContents([*copied, *map(model.get_parameter, written)])
        known = set(map(id, copied))
        self._others = [(name, b, b._version) for name, b in every if id(b) not in known]

    def lost(self) -> str:
        """Return the name of a buffer that was written to and cannot be put back, or ''."""
        return next((name for name, b, version in self._others if b._version != version), "")

    def restore(self) -> None:
        """Put random numbers, attributes and buffers back, as if the call had never been."""
        self.stream.restore()
        self.state.restore()
        self.buffers.undo()


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b) or ((a == b) | (a != a)).all())


def numpy_state() -> Any:
    """Return the state of numpy's random numbers; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")  # where it is not loaded, nothing draws from it
    return numpy.random.get_state() if numpy is not None else None


def draw_from_numpy() -> None:
    """Draw one of numpy's random numbers, where it is loaded."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random_sample()
