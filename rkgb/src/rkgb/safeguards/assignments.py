"""Attributes and buffers that a forward sets without reading them before.

The results of such a forward do not depend on their old values, so a step may set them at its end.
Examples are weights that a hook computes, values that a module keeps for its user, and sizes.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from rkgb.elements.effect import Assign
from rkgb.elements.trees import holds_tensors
from rkgb.errors import SideEffectError, in_module
from rkgb.guards.contents import CONTAINERS
from rkgb.safeguards.refusals import place_of
from rkgb.torch_api.patches import Patches

_PLAIN = (bool, int, float, str)
_OWN = frozenset(("_parameters", "_buffers", "_modules"))
_ABSENT = object()


class AssignsError(Exception):
    """A forward has set attributes; `names` are (path of the module, name)."""

    def __init__(self, names: frozenset[tuple[str, str]]) -> None:
        super().__init__(names)
        self.names = names


def assigned(
    twin: nn.Module, before: Mapping[str, Mapping[str, Any]], buffers: Mapping[str, Tensor]
) -> frozenset[tuple[str, str]]:
    """Return the attributes that refer to another object than before, and changed buffers."""
    found = set()
    for path, module in twin.named_modules():
        old = before.get(path, {})
        for name, value in vars(module).items():
            if name not in _OWN and _is_set(value, old.get(name, _ABSENT), name):
                found.add((path, name))
    now = dict(twin.named_buffers(remove_duplicate=False))
    for target, buffer in now.items():
        if buffers.get(target) is not buffer:
            path, _, name = target.rpartition(".")
            found.add((path, name))
    return frozenset(found)


def _is_set(value: Any, old: Any, name: str) -> bool:
    if value is old:
        return False
    if not callable(value) and holds_tensors(value):
        return True
    if name.startswith("_"):
        return False  # libraries' own
    return isinstance(value, (*_PLAIN, *CONTAINERS)) and _differ(value, old)


def _differ(value: Any, old: Any) -> bool:
    """Return whether a value differs from the old one; contents are compared elsewhere."""
    try:
        return bool(type(value) is not type(old) or value != old)
    except Exception:  # `__eq__` may raise anything
        return True


class ReadsBeforeError(SideEffectError):
    """A forward reads an attribute before it sets it."""

    target: tuple[str, str] = ("", "")  # path of the module, and name


class Hidden:
    """The attributes that a forward sets, hidden from it until it has set them."""

    def __init__(self, twin: nn.Module, names: frozenset[tuple[str, str]]) -> None:
        self.twin = twin
        self.names = {(id(twin.get_submodule(path)), name): path for path, name in names}
        self.targets = sorted(names)
        self.values: dict[tuple[str, str], Any] = {}
        for path, name in names:
            module = twin.get_submodule(path)
            if hasattr(type(module), name):
                self._refuse(path, name)
            vars(module).pop(name, None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, reading an attribute that has not been set yet is refused."""
        original: Any = nn.Module.__getattr__

        def look(module: nn.Module, name: str) -> Any:
            path = self.names.get((id(module), name))
            if path is not None and name not in module._buffers:
                self._refuse(path, name)
            return original(module, name)

        with Patches([(nn.Module, "__getattr__", look)]):
            yield

    def effects(self) -> list[tuple[Assign, Any]]:
        """Return the attributes that were set, with their values.

        Raises:
            SideEffectError: an earlier recording has set an attribute that this one has not.
        """
        for path, name in self.targets:
            if not hasattr(self.twin.get_submodule(path), name):
                raise SideEffectError.to_capture(
                    type(self.twin).__name__,
                    f"set the attribute '{name}' at each call, or outside of forward",
                    "its forward sets it at one call, and not at another",
                    in_module(path),
                    module_path=path,
                )
        return [
            (Assign(path, name), getattr(self.twin.get_submodule(path), name))
            for path, name in self.targets
        ]

    def _refuse(self, path: str, name: str) -> None:
        frames = traceback.walk_stack(sys._getframe(2))
        _, source = place_of(self.twin, reversed(list(frames)))
        error = ReadsBeforeError.to_capture(
            type(self.twin).__name__,
            f"keep the attribute '{name}' in a buffer, or change it outside of forward",
            "its forward looks at it, and then changes it",
            f"{source} in {in_module(path)}",
            module_path=path,
        )
        error.target = path, name
        raise error
