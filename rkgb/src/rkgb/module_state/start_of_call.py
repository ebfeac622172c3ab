"""The state in Python that a forward may change: attributes of modules, and random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device.rng import KeptGenerators
from rkgb.elements.tensor_info import named_apart, same_values
from rkgb.guards.code_watch import CodeWatch
from rkgb.outside.changes import Outside
from rkgb.outside.contents import Contents
from rkgb.outside.held import OF_MODULE, has_content
from rkgb.outside.known import OutsideState
from rkgb.outside.reached import Reached
from rkgb.outside.readable import Readable
from rkgb.outside.used_up import is_used_up
from rkgb.torch_api.compiled_code import uncompiled
from rkgb.torch_api.private.autograd import set_version


class PythonRandom:
    """The random states of Python and, if loaded, numpy, and the state outside of modules.

    Outside of modules are the places that forwards were observed to change (`OutsideState`).
    """

    def __init__(self, *, lends: bool = False) -> None:
        self.python = random.getstate()
        self.numpy = numpy_state()
        self.outside = OutsideState(lends=lends)
        self._leaves = False

    def leave(self) -> None:
        """Do not restore random states: another thread draws."""
        self._leaves = True

    def restore(self) -> None:
        """Restore these states."""
        self.outside.restore()
        if self._leaves:
            return
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextlib.contextmanager
def finding_what_changes(model: nn.Module) -> Iterator[None]:
    """Put back what the functions that run change outside of modules; know it from now on."""
    outside = Outside(model)
    try:
        with uncompiled(), CodeWatch(lambda: "", outside.note):
            yield
    finally:
        outside.remember()
        outside.close()


class ModuleState:
    """The attributes of every module of a model, and what the objects in them hold.

    Which parameters want gradients is part of it, of this model or of a larger one `around` it.
    """

    def __init__(self, model: nn.Module, around: nn.Module | None = None) -> None:
        self.model = model
        self._wanting = [(p, p.requires_grad) for p in (around or model).parameters()]
        self.modules = [
            (path, module, dict(vars(module))) for path, module in model.named_modules()
        ]
        self.contents, reached = Contents(), Reached(frozenset())
        for path, _, attributes in self.modules:
            for name, value in attributes.items():
                if has_content(value):
                    self.contents.add(value, lends=False)
                if name not in OF_MODULE:
                    reached.add_named(_joined(path, name), value)
        self._led_to = reached.tensors  # by attributes, which are named
        for owner in reached.owners.values():
            if not isinstance(owner, (FunctionType, ModuleType, type)):
                self.contents.add(owner, lends=False)
        self.random = PythonRandom()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, buffers and tensors to which attributes lead, with names."""
        for path, _, attributes in self.modules:
            for table in (attributes["_parameters"], attributes["_buffers"]):
                yield from ((_joined(path, n), t) for n, t in table.items() if t is not None)
        yield from self._led_to

    def restore(self) -> None:
        """Restore every attribute, and the content of containers."""
        self.random.restore()
        for _, module, before in self.modules:
            now = vars(module)
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if now.get(name) is not value:
                    now[name] = value
        self.contents.restore()
        for parameter, wants in self._wanting:
            if parameter.requires_grad != wants:
                parameter.requires_grad_(wants)


class Lent:
    """Copies of objects that change by being used, in a module and outside, for one run."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (vars(part), name)
            for part in module.modules()
            for name, value in vars(part).items()
            if is_used_up(value)
        ]
        self._lend()

    def again(self) -> None:
        """Install new copies for another run."""
        self.end()
        self._lend()

    def end(self) -> None:
        """Restore the originals."""
        self._outside.restore()
        self._contents.restore()

    def _lend(self) -> None:
        self._contents, self._outside = Contents(), OutsideState(lends=True)
        for table, name in self._places:
            self._contents.add(table, name)


class BufferContents:
    """The contents of a module's buffers, and of other tensors of it, for restoring them."""

    def __init__(self, of: nn.Module | Iterable[Tensor], others: Iterable[Tensor] = ()) -> None:
        buffers = of.buffers() if isinstance(of, nn.Module) else of
        self.copies = [(b, b.detach().clone()) for b in (*buffers, *others)]
        self._versions = [(b, b._version) for b, _ in self.copies if not b.is_inference()]

    def restore(self, *, raises_versions: bool = True) -> None:
        """Restore contents; where versions stay as they are, older autograd graphs stay valid."""
        with torch.no_grad():
            for buffer, copy in self.copies:
                (buffer if raises_versions else buffer.data).copy_(copy)

    def exchange(self, *, raises_versions: bool = True) -> None:
        """Restore contents, and keep the present ones in the memory of the copies."""
        with torch.no_grad():
            for buffer, copy in self.copies:
                now = buffer.detach().clone()
                (buffer if raises_versions else buffer.data).copy_(copy)
                copy.copy_(now)

    def undo(self) -> None:
        """Restore contents and versions, so that older autograd graphs stay valid."""
        self.restore()
        for buffer, version in self._versions:
            set_version(buffer, version)

    def changed(self) -> bool:
        """Return whether a buffer has other content now."""
        return not all(same_values(buffer, copy) for buffer, copy in self.copies)


class StartOfCall:
    """The state at the start of a call of a model, for a second call in its place.

    If it is known which buffers the call `writes`, only these are copied.
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
        """Return the name of a written buffer that cannot be restored, or ''."""
        return next((name for name, b, version in self._others if b._version != version), "")

    def restore(self) -> None:
        """Restore random states, attributes and buffers, as if the call had not run."""
        self.stream.restore()
        self.state.restore()
        self.buffers.undo()


class FirstRun:
    """The state at the first run of a part of a model, for a second run from there.

    The contents of the tensors `copied` are part of it, and what its Python may read outside.
    With a `device`, the random states are, too. All other `tensors` that its Python may read, or
    that it is `given`, must be as they were.
    """

    def __init__(
        self,
        part: nn.Module,
        copied: Iterable[Tensor],
        reads: Iterable[Readable],
        *,
        path: str = "",
        given: Mapping[str, Tensor] = MappingProxyType({}),
        around: nn.Module | None = None,
        device: torch.device | None = None,
        raises_versions: bool = False,
    ) -> None:
        self._part, self._around, self._device = part, around, device
        self._copied, self._raises = [*copied], raises_versions
        self._outside = [one.now() for one in reads]
        state = self._now()
        self._restore_then, self._contents = self._present(state), BufferContents(self._copied)
        led_to = [pair for one in self._outside for pair in one.tensors]
        own = [(_joined(path, name), tensor) for name, tensor in state.tensors()]
        known = {*map(id, self._copied)}
        read = [pair for pair in (*led_to, *own) if id(pair[1]) not in known]
        self.tensors = named_apart((*read, *given.items()))
        self._marks = {name: _mark(tensor) for name, tensor in self.tensors.items()}

    def changed(self) -> str:
        """Return the name of a tensor that was changed since, or ''; not all changes count."""
        now = (name for name, t in self.tensors.items() if _mark(t) != self._marks[name])
        return next(now, "")

    @contextlib.contextmanager
    def as_then(self, *, is_last: bool = False) -> Iterator[None]:
        """Set this state, and restore the present one at exit.

        The last time, the present contents of buffers take the memory of those that were kept.
        """
        restore_now = [one.as_now().restore for one in self._outside]
        restore_now += self._present(self._now())
        contents = self._contents if is_last else BufferContents(self._copied)
        restore_now.append(partial(contents.restore, raises_versions=self._raises))
        if is_last:
            contents.exchange(raises_versions=self._raises)
        else:
            self._contents.restore(raises_versions=self._raises)
        for restore in self._restore_then:
            restore()
        for one in self._outside:
            one.lend()
        try:
            yield
        finally:
            for restore in restore_now:
                restore()

    def _now(self) -> ModuleState:
        return ModuleState(self._part, self._around)

    def _present(self, state: ModuleState) -> list[Callable[[], None]]:
        """Return what restores this state and the present random one."""
        stream = None if self._device is None else KeptGenerators.keep(self._device)
        return [*([] if stream is None else [stream.restore]), state.restore]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return what changes where a tensor is written in place, or gets other memory."""
    version = -1 if tensor.is_inference() else tensor._version
    return version, 0 if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def numpy_state() -> Any:
    """Return numpy's random state, or None if numpy is not loaded."""
    numpy = sys.modules.get("numpy")  # if it is not loaded, nothing draws from it
    return numpy.random.get_state() if numpy is not None else None


def draw_from_numpy() -> None:
    """Draw one random number of numpy's, if it is loaded."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random_sample()
