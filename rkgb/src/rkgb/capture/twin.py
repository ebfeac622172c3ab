"""A copy of a module for running a step, so that the user's module is not affected."""

from __future__ import annotations

import copy
import functools
import io
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.tensor_info import storage_id
from rkgb.errors import TraceError
from rkgb.guards.contents import Untouched
from rkgb.guards.entries import cell_content
from rkgb.guards.loads import loads_of
from rkgb.torch_api.compiled_code import is_optimized, written_function
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.modes import mode_of
from rkgb.torch_api.tensor_facts import attributes_of, leaf_of_kind


@dataclass(frozen=True)
class Twin:
    """A copy of a module, with the originals of its parts."""

    module: nn.Module
    originals: Mapping[int, Any]  # id of a copy -> its original
    tensors: Mapping[Hashable, Tensor]  # geometry of a copy of a tensor -> the tensor
    # Kept alive although the forward may replace them, so that no new object gets their id.
    copies: tuple[Any, ...]


def twin_of(model: nn.Module, own: Collection[str] = ()) -> Twin:
    """Return a copy whose parameters are new leaves on the same memory, and whose buffers are
    clones.

    The parameters `own` are clones too, because the forward writes to them. Locks, process groups
    and the like among the attributes are shared with the model. Open files and generators are
    replaced by objects that refuse to be used.

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
    hold_copies(twin, memo)
    kept_alive = memo.get(id(memo), [])  # deepcopy's own list of everything copied
    pairs = [(memo[id(old)], old) for old in kept_alive if id(old) in memo]
    tensors = {geometry_of(new): old for new, old in pairs if isinstance(new, Tensor)}
    originals = {id(new): old for new, old in pairs}
    return Twin(twin, originals, tensors, tuple(new for new, _ in pairs))


def geometry_of(tensor: Tensor) -> Hashable:
    """Return the memory, offset, shape and strides of a tensor, as a key."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = storage_id(tensor), tensor.storage_offset(), tensor.is_conj()
    return place, tensor.dtype, tensor.shape, tensor.stride()


def _memo(model: nn.Module) -> dict[int, Any]:
    """Return copies, by id, that deepcopy must not make itself."""
    mode = mode_of(next(model.parameters(), None))
    memo: dict[int, Any] = {id(mode): mode}  # the mode of tensors without content, shared by copies
    for parameter in model.parameters():
        memo[id(parameter)] = leaf_of_kind(parameter, parameter.detach())
    memo.update(uncopied(model))
    return memo


def deep_copy(
    model: nn.Module, memo: dict[int, Any], copy_of: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Return a deep copy; `copy_of` copies tensors with a history.

    `memo` has the copies of parameters. These get copies of their attributes: a step may set them.

    Raises:
        TraceError: the module cannot be copied.
    """
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
    found += [torch.Stream, torch.Event, *_ONCE]
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
    stack: list[Any] = [model]
    seen: dict[int, Any] = {}
    while stack:
        value = stack.pop()
        kind = type(value)  # some objects of C libraries have no `__class__`
        if id(value) in seen or issubclass(kind, (Tensor, type, str, bytes, int, float)):
            continue
        seen[id(value)] = value
        if issubclass(kind, shared):
            yield value
        elif issubclass(kind, Mapping):
            stack += [*value.keys(), *value.values()]
        elif issubclass(kind, (list, tuple, set, frozenset)):
            stack += value
        elif kind is types.MethodType:
            stack.append(value.__self__)
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


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def hold_copies(twin: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let functions among the attributes of `twin` refer to copies; compiled ones as written.

    `copies` maps the id of an object to its copy. Backward hooks are called in steps, by modules
    that run whole, and not while one is planned: others that do nothing take their places.
    """
    for module in twin.modules():
        for table in (module._backward_hooks, module._backward_pre_hooks):
            table.update(dict.fromkeys(table, _look_at_nothing))
        for name, value in vars(module).items():
            if isinstance(value, dict):  # for example hooks
                for key, held in list(value.items()):
                    made = _with_copies(held, copies)
                    if made is not held:  # a special dict may refuse to be written
                        value[key] = made
            elif not is_optimized(module):
                vars(module)[name] = _with_copies(value, copies)


def _look_at_nothing(_module: nn.Module, *_gradients: Any) -> None:
    """Take the place of a backward hook, so that there are the same nodes in the graph."""


def _with_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    written = written_function(value)
    value = value if written is None else written
    return _Maker(copies).copy_of(value) if isinstance(value, _FUNCTIONS) else value


def _leads_to(value: Any, copies: Mapping[int, Any]) -> bool:
    """Return whether a function refers to a copied object, and none in it assigns outside."""
    stack, seen, found = [value], {id(value)}, False
    while stack:
        function = stack.pop()
        if isinstance(function, types.FunctionType) and loads_of(function.__code__).stores:
            return False
        for held in _held_by(function):
            if isinstance(held, (nn.Module, Tensor)):
                found |= id(held) in copies
            elif isinstance(held, _FUNCTIONS) and id(held) not in seen:
                seen.add(id(held))
                stack.append(held)
    return found


def _held_by(function: Any) -> Iterator[Any]:
    if isinstance(function, types.MethodType):
        yield from (function.__self__, function.__func__)
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    else:
        yield from map(cell_content, function.__closure__ or ())
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()


class _Maker:
    """Rebuilds functions; functions that refer to each other are rebuilt once."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self.copies = copies
        self.made: dict[int, Any] = {}

    def copy_of(self, value: Any) -> Any:
        """Return the copy of a value, a rebuilt function, or the value itself."""
        if not self._is_made_anew(value):
            return self.copies.get(id(value), value)
        if id(value) not in self.made:
            if isinstance(value, types.MethodType):
                owner = self.copy_of(value.__self__)
                self.made[id(value)] = types.MethodType(self.copy_of(value.__func__), owner)
            elif isinstance(value, functools.partial):
                args = map(self.copy_of, value.args)
                named = {name: self.copy_of(held) for name, held in value.keywords.items()}
                self.made[id(value)] = functools.partial(self.copy_of(value.func), *args, **named)
            else:
                self._make(value)
        return self.made[id(value)]

    def _is_made_anew(self, value: Any) -> bool:
        return isinstance(value, _FUNCTIONS) and _leads_to(value, self.copies)

    def _make(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        held = {id(cell): cell_content(cell) for cell in cells}
        # Other variables are shared, because functions that are not rebuilt may assign to them.
        changed = {
            place: types.CellType()
            for place, value in held.items()
            if id(value) in self.copies or self._is_made_anew(value)
        }
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            tuple(map(self.copy_of, function.__defaults__ or ())) or None,
            tuple(changed.get(id(cell), cell) for cell in cells),
        )
        self.made[id(function)] = made  # before its references, which may refer back
        made.__dict__.update(function.__dict__)
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        named = function.__kwdefaults__
        made.__kwdefaults__ = named and {n: self.copy_of(value) for n, value in named.items()}
        for place, cell in changed.items():
            cell.cell_contents = self.copy_of(held[place])
