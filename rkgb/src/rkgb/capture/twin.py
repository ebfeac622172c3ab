"""A copy of a module for running a step, so that the user's module is not affected."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import threading
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.tensor_info import storage_id
from rkgb.errors import TraceError
from rkgb.guards.entries import cell_content
from rkgb.guards.loads import loads_of
from rkgb.outside.held import CONTAINERS, OF_MODULE
from rkgb.outside.identities import identity
from rkgb.outside.known import OutsideState
from rkgb.outside.used_up import Untouched
from rkgb.torch_api.compiled_code import is_optimized, written_function
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.modes import mode_of
from rkgb.torch_api.tensor_facts import attributes_of, leaf_of_kind


@dataclass(frozen=True)
class Twin:
    """A copy of a module, with the originals of its parts."""

    module: nn.Module
    originals: Mapping[int, Any]  # id of a copy -> its original
    copies: Copies  # by the originals
    tensors: Mapping[Hashable, Tensor]  # geometry of a copy of a tensor -> the tensor

    @contextlib.contextmanager
    def known_outside(self) -> Iterator[nn.Module]:
        """Yield the copy; where forwards were seen to know the module, they know it instead."""
        outside, module = OutsideState(lends=True, copy_of=self.copies.of), self.module
        del self  # a step frees copies that it replaces
        try:
            yield module
        finally:
            outside.restore()


def twin_of(model: nn.Module, own: Collection[str] = (), *, hooks_know_model: bool = False) -> Twin:
    """Return a copy whose parameters are new leaves on the same memory, and whose buffers are
    clones.

    The parameters `own` are clones too, because the forward writes to them. Locks, process groups
    and the like among the attributes are shared with the model. Open files and generators are
    replaced by objects that refuse to be used. With `hooks_know_model`, hooks refer to the model
    itself instead of the copy.

    Raises:
        TraceError: the module cannot be copied.
    """
    memo = _memo(model)
    for name in own:
        parameter = model.get_parameter(name)
        clone = parameter.detach().clone()
        memo[id(parameter)] = leaf_of_kind(parameter, clone)
    buffers = {id(buffer) for buffer in model.buffers()}  # to which a step may write

    def without_history(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if id(tensor) in buffers else tensor.detach()

    twin = deep_copy(model, memo, without_history)
    copies = Copies(model, twin, memo)
    knows_model = not hooks_know_model
    hold_copies(twin, copies, Copies(model, twin, memo, knows_model=knows_model))
    kept_alive = memo.get(id(memo), [])  # deepcopy's own list of everything copied
    pairs = [(memo[id(old)], old) for old in kept_alive if id(old) in memo]
    tensors = {geometry_of(new): old for new, old in pairs if isinstance(new, Tensor)}
    originals = {id(new): old for new, old in pairs}
    return Twin(twin, originals, copies, tensors)


def geometry_of(tensor: Tensor) -> Hashable:
    """Return the memory, offset, shape and strides of a tensor, as a key."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = storage_id(tensor), tensor.storage_offset(), tensor.is_conj()
    return place, tensor.dtype, tensor.shape, tensor.stride()


class Memo(dict[int, Any]):
    """Copies by the ids of originals, for deepcopy; views of one module have one copy."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__(known)
        self.views: dict[int, list[int]] = {}  # of a module, by its id

    def __setitem__(self, key: int, value: Any) -> None:
        for view in self.views.get(key, ()):
            super().__setitem__(view, value)
        super().__setitem__(key, value)


def _memo(model: nn.Module) -> Memo:
    """Return copies, by id, that deepcopy must not make itself."""
    mode = mode_of(next(model.parameters(), None))
    memo = Memo({id(mode): mode})  # the mode of tensors without content, shared by copies
    for parameter in model.parameters():
        memo[id(parameter)] = leaf_of_kind(parameter, parameter.detach())
    memo.update(uncopied(model))
    return memo


def deep_copy(model: nn.Module, memo: Memo, copy_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a deep copy; `copy_of` copies tensors with a history.

    `memo` has the copies of parameters. These get copies of their attributes: a step may set them.

    Raises:
        TraceError: the module cannot be copied.
    """
    # What runs here may be a view without hooks, and parts of the model may know the model itself.
    memo.views[id(model)] = [id(one) for one in _reached(model) if _is_view(one, model)]
    try:
        with _copying_histories(copy_of):
            for parameter in model.parameters():
                if attributes := attributes_of(parameter):
                    vars(memo[id(parameter)]).update(copy.deepcopy(attributes, memo))
            return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be deep-copied{_culprit(model, memo)} ({error}), which "
            "recording a step of it needs. Make the module copyable."
        ) from error


def _is_view(value: Any, model: nn.Module) -> bool:
    """Return whether a value is a module that shares its submodules with a model."""
    return issubclass(type(value), nn.Module) and identity(value) == identity(model)


def _copying_histories(copy_of: Callable[[Tensor], Tensor]) -> Patches:
    """While active, `copy_of` copies tensors with a history, which an earlier step has left."""
    plain: Any = Tensor.__deepcopy__

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if tensor.is_leaf:
            return plain(tensor, memo)  # type: ignore[no-any-return]
        found: Tensor = memo.setdefault(id(tensor), copy_of(tensor))
        return found

    return Patches([(Tensor, "__deepcopy__", copied)])


# Objects that can be read or written once: a recording would consume them.
_ONCE: tuple[type, ...] = (io.IOBase, types.GeneratorType)


def _shared_types() -> tuple[type, ...]:
    """Return types that cannot be copied and that a forward does not change."""
    found: list[type] = [type(threading.Lock()), type(threading.RLock()), types.ModuleType]
    found += [torch.Stream, torch.Event, weakref.finalize, *_ONCE]
    if torch.distributed.is_available():
        found.append(torch.distributed.ProcessGroup)
    return tuple(found)


def uncopied(model: nn.Module) -> dict[int, Any]:
    """Return, by id, replacements of objects that cannot be copied."""
    return {
        id(part): Untouched(_place(model, part)) if isinstance(part, _ONCE) else part
        for part in _shared_parts(model)
    }


def _place(model: nn.Module, value: Any) -> str:
    kind = f"an open file or a generator ({type(value).__name__})"
    for path, module in model.named_modules():
        for name, other in vars(module).items():
            if other is value:
                return f"attribute '{name}' of module '{path or '(root)'}', {kind}"
    return f"what an attribute leads to, {kind}"


def _shared_parts(model: nn.Module) -> Iterator[Any]:
    """Yield the objects in attributes of a module that its copies must share."""
    shared = _shared_types()
    return (value for value in _reached(model) if issubclass(type(value), shared))


def _reached(model: nn.Module) -> Iterator[Any]:
    """Yield the objects to which attributes of a module lead."""
    shared = _shared_types()
    stack: list[Any] = [model]
    seen: dict[int, Any] = {}
    while stack:
        value = stack.pop()
        kind = type(value)  # some objects of C libraries have no `__class__`
        if id(value) in seen or issubclass(kind, (Tensor, type, str, bytes, int, float)):
            continue
        seen[id(value)] = value
        yield value
        if issubclass(kind, shared):
            continue
        if issubclass(kind, Mapping):
            stack += [*value.keys(), *value.values()]
        elif issubclass(kind, (list, tuple, set, frozenset)):
            stack += value
        elif kind is types.MethodType:
            stack.append(value.__self__)
        elif kind is functools.partial:
            stack += [value.func, value.args, value.keywords]
        elif kind is not types.FunctionType:
            stack += getattr(value, "__dict__", {}).values()


def _culprit(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """Return the attribute that cannot be copied, in words."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # any error means that it cannot be copied
                return f", because of attribute '{name}' of module '{path or '(root)'}'"
    return ""


_MOST_KNOWN = 1000  # objects to which a function leads
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def hold_copies(twin: nn.Module, copies: Copies, of_hooks: Copies) -> None:
    """Let functions among the attributes of `twin` refer to copies; compiled ones as written.

    What hooks set on the whole model, they set in every step: these refer to it itself. Backward
    hooks are called in steps, by modules that run whole, and not while one is planned: others that
    do nothing take their places.
    """
    for module in twin.modules():
        for table in (module._backward_hooks, module._backward_pre_hooks):
            table.update(dict.fromkeys(table, _look_at_nothing))
        for name, value in vars(module).items():
            if isinstance(value, dict):  # for example hooks
                for key, held in list(value.items()):
                    made = _with_copies(held, of_hooks if name in OF_MODULE else copies)
                    if made is not held:  # a special dict may refuse to be written
                        value[key] = made
            elif not is_optimized(module):
                vars(module)[name] = _with_copies(value, copies)


def _look_at_nothing(_module: nn.Module, *_gradients: Any) -> None:
    """Take the place of a backward hook, so that there are the same nodes in the graph."""


def _with_copies(value: Any, copies: Copies) -> Any:
    written = written_function(value)
    value = value if written is None else written
    return copies.of(value) if isinstance(value, _FUNCTIONS) else value


def _held_by(function: Any) -> Iterator[Any]:
    if isinstance(function, types.MethodType):
        yield from (function.__self__, function.__func__)
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    else:
        yield from map(cell_content, function.__closure__ or ())
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()


def known_by(function: Any) -> list[Any]:
    """Return the modules and containers to which a function leads, also by way of others."""
    stack, seen, found = [function], set[int](), list[Any]()
    while stack and len(seen) < _MOST_KNOWN:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)  # not `isinstance`, which asks objects what they are
        if issubclass(kind, nn.Module):
            found.append(value)
        elif issubclass(kind, _FUNCTIONS):
            stack += _held_by(value)
            if kind is types.FunctionType:
                named = loads_of(value.__code__).globals
                stack += [value.__globals__[name] for name in named if name in value.__globals__]
        elif issubclass(kind, CONTAINERS):
            found.append(value)
            if len(value) <= _MOST_KNOWN:
                stack += value.values() if issubclass(kind, Mapping) else value
        elif not issubclass(kind, (type, types.ModuleType, Tensor)):
            stack += getattr(value, "__dict__", {}).values()
    return found


_around: ContextVar[Copies | None] = ContextVar("copies that are copied again", default=None)


class Copies:
    """The copies of what a module holds; `memo` has them by the ids of the originals.

    A function that refers to an original is rebuilt, once, to refer to the copy. All copies are
    kept alive, although a forward may replace them: no new object gets the id of one.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        memo: Mapping[int, Any],
        *,
        knows_model: bool = True,
    ) -> None:
        self._model, self._twin, self._memo = model, twin, memo
        self._knows_model = knows_model
        self._first: Copies | None = _around.get()
        self._made: dict[int, tuple[Any, Any]] = {}  # functions, each with the rebuilt one

    @contextlib.contextmanager
    def copied_again(self) -> Iterator[None]:
        """While active, copies of the copy are copies of these originals."""
        around = _around.set(self)
        try:
            yield
        finally:
            _around.reset(around)

    def of(self, value: Any) -> Any:
        """Return the copy of a value, a rebuilt function, or the value itself."""
        if self._first is not None:
            value = self._first.of(value)
        if _is_view(value, self._model):
            return self._twin if self._knows_model else value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if type(value) is tuple:
            made: Any = tuple(map(self.of, value))
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
        if type(value) is types.BuiltinMethodType and isinstance(value.__self__, Tensor):
            made = self.of(value.__self__)
            return value if made is value.__self__ else getattr(made, value.__name__)
        if type(value) is weakref.ref:
            made = self.of(held := value())
            return value if made is held else weakref.ref(made)
        if not self._is_made_anew(value):
            return value
        if id(value) not in self._made:
            if isinstance(value, types.FunctionType):
                self._make(value)
            elif isinstance(value, types.MethodType):
                bound = types.MethodType(self.of(value.__func__), self.of(value.__self__))
                self._made[id(value)] = value, bound
            else:
                named = {name: self.of(held) for name, held in value.keywords.items()}
                part = functools.partial(self.of(value.func), *map(self.of, value.args), **named)
                self._made[id(value)] = value, part
        return self._made[id(value)][1]

    def _is_copied(self, value: Any) -> bool:
        is_model = _is_view(value, self._model)
        return self._knows_model if is_model else id(value) in self._memo

    def _is_made_anew(self, value: Any) -> bool:
        """Return whether a function refers to a copied object, and none in it assigns outside."""
        stack, seen, found = [value], {id(value)}, False
        while issubclass(type(value), _FUNCTIONS) and stack:
            function = stack.pop()
            if isinstance(function, types.FunctionType) and loads_of(function.__code__).stores:
                return False
            for held in _held_by(function):
                if issubclass(type(held), (nn.Module, Tensor, *CONTAINERS)):
                    found = found or self._is_copied(held)
                elif issubclass(type(held), _FUNCTIONS) and id(held) not in seen:
                    seen.add(id(held))
                    stack.append(held)
        return found

    def _make(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        held = {id(cell): cell_content(cell) for cell in cells}
        # Other variables are shared, because functions that are not rebuilt may assign to them.
        changed = {
            place: types.CellType()
            for place, value in held.items()
            if self._is_copied(value) or self._is_made_anew(value)
        }
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            tuple(map(self.of, function.__defaults__ or ())) or None,
            tuple(changed.get(id(cell), cell) for cell in cells),
        )
        self._made[id(function)] = function, made  # first, as what it refers to may refer back
        made.__dict__.update(function.__dict__)
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        named = function.__kwdefaults__
        made.__kwdefaults__ = named and {n: self.of(value) for n, value in named.items()}
        for place, cell in changed.items():
            cell.cell_contents = self.of(held[place])
