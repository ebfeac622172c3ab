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
        """The path of the stage, for messages: its first and its last module."""
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
    """Return a module and all that it contains, each once: `modules()`, without their names."""
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
    """Return whether a module does nothing but run its children in order.

    A container with hooks of its own, or that says `not_really_sequential`, is run as it is.
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
    """Return the tensor that a module has as a buffer now."""
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


@contextmanager
def replaced_buffers(
    buffers: list[tuple[nn.Module, str]], values: list[torch.Tensor]
) -> Iterator[None]:
    """Put other tensors in the place of buffers, and the original tensors back at exit.

    The objects are exchanged and nothing is copied: a copy would raise the version of a buffer
    that some autograd graph has saved.
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
    """Run with the given train/eval flags, and put the present ones back at exit."""
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
    """Return what a stage has returned as tensors, or refuse it by the stage's name."""
    try:
        return pack(value)
    except TypeError as error:
        raise StageError(
            f"stage {code.name} must return a tensor, or a tuple or list of tensors; it returned "
            f"{error}. Change the stage, or join it with the next one into a module.",
            code.name,
        ) from None
