"""Stages of a module: nested `nn.Sequential`s flattened, and modules that run as one stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor.errors import NotSequentialError, StageError
from rotor.runtime.boundary import Layout, Tensors, pack


@dataclass(frozen=True, slots=True)
class CodeStage:
    """Modules that run one after the other as a single stage."""

    names: tuple[str, ...]  # paths in the whole module
    modules: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        """The paths of the first and the last module, for messages."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]}..{self.names[-1]}"

    def __call__(self, value: Any) -> Any:
        for module in self.modules:
            value = module(value)
        return value

    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once, in registration order."""
        return parameters_of(self.submodules())

    def submodules(self) -> Iterator[nn.Module]:
        """All modules inside, each once."""
        return iter(dict.fromkeys(i for module in self.modules for i in modules_inside(module)))

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Every buffer as (owner, name)."""
        return [
            (module, name)
            for module in self.submodules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


def modules_inside(module: nn.Module) -> list[nn.Module]:
    """Return what `module.modules()` returns, faster."""
    found: dict[nn.Module, None] = {}
    todo: list[nn.Module | None] = [module]
    while todo:
        inner = todo.pop()
        if inner is not None and inner not in found:
            found[inner] = None
            todo.extend(reversed(inner._modules.values()))
    return list(found)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return each parameter that these modules own, once and in order."""
    found = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    return list(found.values())


def is_transparent(module: nn.Module) -> bool:
    """Return whether a module only runs its children in order.

    A container that has hooks, or the attribute `not_really_sequential`, is one stage.
    """
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not getattr(module, "not_really_sequential", False)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def flatten(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that a sequential module runs, in order, with their paths.

    Raises:
        NotSequentialError: the module is no `nn.Sequential`, has a `forward` of its own, or is
            empty.
    """
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise NotSequentialError(
            f"Checkpointable needs an nn.Sequential, whose children run one after the other; got "
            f"{type(module).__name__}. Write the forward as a Sequential of modules (see "
            f"rotor.models for examples)."
        )
    found = list(_flatten(module, ""))
    if not found:
        raise NotSequentialError(
            "Checkpointable needs at least one module to run; the nn.Sequential is empty. "
            "Add a module."
        )
    return found


def _flatten(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        assert child is not None
        if is_transparent(child):
            yield from _flatten(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def current_buffer(module: nn.Module, name: str) -> torch.Tensor:
    """Return a module's buffer as it is at present."""
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


@contextmanager
def replaced_buffers(
    buffers: list[tuple[nn.Module, str]], values: list[torch.Tensor]
) -> Iterator[None]:
    """Replace buffers by other tensors, and restore the originals at exit.

    The tensor objects are swapped. Copying the values would raise the version of a buffer that an
    autograd graph may have saved.
    """
    originals = [module._buffers[name] for module, name in buffers]
    try:
        for (module, name), value in zip(buffers, values, strict=True):
            module._buffers[name] = value
        yield
    finally:
        for (module, name), original in zip(buffers, originals, strict=True):
            module._buffers[name] = original


@contextmanager
def training_flags(modules: Sequence[nn.Module], flags: list[bool]) -> Iterator[None]:
    """Run with the given train/eval flags, and restore the present ones at exit."""
    present = [module.training for module in modules]
    if present == flags:
        yield
        return
    try:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
        yield
    finally:
        for module, flag in zip(modules, present, strict=True):
            module.training = flag


def pack_output(value: Any, code: CodeStage) -> tuple[Tensors, Layout]:
    """Return the tensors of a stage's output.

    Raises:
        StageError: the output contains something other than tensors.
    """
    try:
        return pack(value)
    except TypeError as error:
        raise StageError(
            f"stage {code.name} must return a tensor, or a tuple or list of tensors; it returned "
            f"{error}. Change the stage, or join it with the next one into a module.",
            code.name,
        ) from None
