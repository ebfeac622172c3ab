"""Attributes and buffers that a forward sets without reading them before, and what it changes.

The results of such a forward do not depend on their old values, so a step may set them at its end.
Examples are weights that a hook computes, values that a module keeps for its user, and sizes.
Containers and objects among the arguments may be changed, too.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from rkgb.elements.effect import Assign, ContainerMutation
from rkgb.elements.module_paths import is_inside, is_inside_any
from rkgb.elements.sample import Sample
from rkgb.elements.trees import flatten, holds_tensors, refilled
from rkgb.errors import BrokenPieceError, NotRecordedError, SideEffectError, in_module
from rkgb.guards.code_watch import Seen
from rkgb.guards.loads import ANY, loads_of
from rkgb.outside.held import OF_MODULE
from rkgb.safeguards.refusals import place_of
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.tensor_facts import set_attribute, written_on

_TORCHS_OWN = OF_MODULE - {"training"}
_ABSENT = object()
_Refusal = TypeVar("_Refusal", bound=SideEffectError)


class AssignsError(Exception):
    """A forward has set attributes; `names` are (path of the module, name)."""

    def __init__(self, names: frozenset[tuple[str, str]]) -> None:
        super().__init__(names)
        self.names = names


class Attributes:
    """The attributes of every module before a forward, its buffers, and its submodules."""

    def __init__(self, twin: nn.Module) -> None:
        self.twin, self._buffers = twin, dict(twin.named_buffers(remove_duplicate=False))
        modules = [*twin.named_modules()]
        self.before = {path: dict(vars(module)) for path, module in modules}
        self._parts = [(path, part, [*part._modules.items()]) for path, part in modules]

    def assigned(self) -> frozenset[tuple[str, str]]:
        """Return the attributes that refer to another object than before, and changed buffers."""
        found = set()
        for path, module in self.twin.named_modules():
            old = self.before.get(path, {})
            for name, value in vars(module).items():
                if name not in _TORCHS_OWN and _is_set(value, old.get(name, _ABSENT)):
                    found.add((path, name))
        now = dict(self.twin.named_buffers(remove_duplicate=False))
        for target, buffer in now.items():
            if self._buffers.get(target) is not buffer:
                path, _, name = target.rpartition(".")
                found.add((path, name))
        return frozenset(found)

    def refuse_others(self, new: Iterable[tuple[str, str]], ran: Collection[Seen]) -> None:
        """Refuse a forward that removes attributes, or gives a module other submodules.

        So is one that may have read `new` attributes by any name before it has set them.

        Raises:
            SideEffectError: with the module.
        """
        for path, module, parts in self._parts:
            gone = min(self.before[path].keys() - vars(module).keys(), default=None)
            if gone is not None or [*module._modules.items()] != parts:
                where = path if gone is not None and all_inside(path, ran, gone) else ""
                what = f"removes the attribute '{gone}'" if gone else "sets submodules"
                raise self._refusal(SideEffectError, what, where, f"of {in_module(path)}")
        asking = [one for one in ran if ANY in loads_of(one.code).attributes]
        for path, name in sorted(new):
            if asking:
                where = path if _ran_inside(path, asking) else ""
                what = f"sets the attribute '{name}', which it may have read in `vars` before"
                error = self._refusal(ReadsBeforeError, what, where, f"of {in_module(path)}")
                error.target = path, name
                raise error

    def refuse_assigned_in_backward(self) -> None:
        """Refuse a backward of the user's that sets attributes.

        Raises:
            SideEffectError: with the name of one.
        """
        for path, name in sorted(self.assigned()):
            what = f"sets the attribute '{name}' in its backward"
            raise self._refusal(SideEffectError, what, "", f"of {in_module(path)}")

    def _refusal(self, kind: type[_Refusal], what: str, path: str, where: str) -> _Refusal:
        return kind.to_capture(
            type(self.twin).__name__,
            "do it outside of forward",
            f"its forward {what}, which a recording would not do again",
            where,
            module_path=path,
        )


def all_inside(path: str, ran: Iterable[Seen], name: str) -> bool:
    """Whether only functions that ran inside of a submodule name an attribute.

    They may have run in others, too: in those of its class.
    """
    named = (one for one in ran if name in (*one.code.co_names, *one.code.co_consts))
    return _ran_inside(path, named)


def _ran_inside(path: str, seen: Iterable[Seen]) -> bool:
    ran = [one.paths for one in seen]
    around = (place for places in ran for place in places if not is_inside(place, path))
    return all(
        any(is_inside(place, path) for place in places) for places in ran
    ) and not is_inside_any(path, around)


def _is_set(value: Any, old: Any) -> bool:
    """Return whether a value differs from the old one; contents are compared elsewhere."""
    if value is old:
        return False
    if not callable(value) and holds_tensors(value):
        return True
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
            if _is_of_this_call(value := getattr(self.twin.get_submodule(path), name)):
                raise SideEffectError.to_capture(
                    type(self.twin).__name__,
                    f"make what the attribute '{name}' holds outside of forward",
                    f"its forward keeps a function there that it has made ({value!r})",
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


def _is_of_this_call(value: Any) -> bool:
    """Whether a value is a function that holds others, of this call or of the module."""
    if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return isinstance(value, (MethodType, partial))


_NO_CONTAINERS = (Tensor, type(None), bool, int, float, str, type, nn.Module)


class FilledArgumentError(BrokenPieceError, SideEffectError):
    """A forward puts tensors into an argument that held none; no opaque call can help."""


class Arguments:
    """The containers among the arguments of a call, and their content before it."""

    def __init__(self, sample: Sample) -> None:
        named: list[tuple[int | str, Any]] = [*enumerate(sample.args), *sample.kwargs.items()]
        own = [(place, value) for place, value in named if not isinstance(value, _NO_CONTAINERS)]
        self._before = [(place, value, *flatten(value)) for place, value in own]
        tensors = {id(leaf): leaf for leaf in sample.leaves if isinstance(leaf, Tensor)}
        self._written = [(tensor, written_on(tensor)) for tensor in tensors.values()]
        # These are the user's own objects; a sample has copies of all that hold tensors.
        self._empty = [
            (leaf, _copy_of(leaf))
            for leaf in sample.leaves
            if not isinstance(leaf, _NO_CONTAINERS) and hasattr(leaf, "__dict__")
        ]

    def refuse_written(self) -> None:
        """Refuse attributes of tensors that were set.

        Raises:
            NotRecordedError: with the name of one.
        """
        for tensor, before in self._written:
            name = set_attribute(before, written_on(tensor))
            if name is not None:
                raise NotRecordedError(
                    f"sets the attribute '{name}' of a tensor that it gets, which a planned step "
                    "would not do",
                    "return what is to be kept",
                )

    def refilled(self) -> list[tuple[ContainerMutation, Any]]:
        """Return the arguments with new content.

        Raises:
            FilledArgumentError: one held no tensors, and does now. It is restored.
        """
        for value, before in self._empty:
            if holds_tensors(value):
                refilled(value, before)
                raise FilledArgumentError(
                    f"the forward puts tensors into an argument, a {type(value).__name__} that "
                    "holds none before. Make it inside of forward, or let it hold some already; "
                    "models of transformers do without caches with use_cache=False."
                )
        found = []
        for place, value, leaves, structure in self._before:
            now, other = flatten(value)
            if other != structure or not all(map(_same, now, leaves)):
                found.append((ContainerMutation(place), value))
        return found


def _copy_of(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # without a copy nothing can be restored
        return value


def _same(a: Any, b: Any) -> bool:
    plain = isinstance(a, (bool, int, float, str)) and type(a) is type(b)
    return a is b or (plain and bool(a == b))
