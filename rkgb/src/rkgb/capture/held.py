"""Rebuilds functions that refer to a module, so that they refer to its copy.

Copying a function returns the function itself. A function that replaces a module's forward, or a
hook, often refers to the module in its closure, its defaults, or as the object of a bound method:
`own = m.forward; m.forward = lambda x: 2 * own(x)`. Functions that assign to outer variables are
not rebuilt, because a step of the copy would then not affect the user's function.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from rkgb.torch_api.compiled_code import is_optimized, written_function

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def hold_copies(twin: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let functions among the attributes of `twin` refer to copies; compiled ones as written.

    `copies` maps the id of an object to its copy.
    """
    for module in twin.modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):  # for example hooks
                for key, held in list(value.items()):
                    made = _with_copies(held, copies)
                    if made is not held:  # a special dict may refuse to be written
                        value[key] = made
            elif not is_optimized(module):
                vars(module)[name] = _with_copies(value, copies)


def _with_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    written = written_function(value)
    value = value if written is None else written
    return _Maker(copies).copy_of(value) if isinstance(value, _FUNCTIONS) else value


def _leads_to(value: Any, copies: Mapping[int, Any]) -> bool:
    """Return whether a function refers to a copied object, and none in it assigns outside."""
    stack, seen, found = [value], {id(value)}, False
    while stack:
        function = stack.pop()
        if isinstance(function, types.FunctionType) and _assigns_outside(function.__code__):
            return False
        for held in _held_by(function):
            if isinstance(held, (nn.Module, Tensor)):
                found |= id(held) in copies
            elif isinstance(held, _FUNCTIONS) and id(held) not in seen:
                seen.add(id(held))
                stack.append(held)
    return found


def _assigns_outside(code: types.CodeType) -> bool:
    """Return whether a function assigns to an outer or global variable."""
    return any(
        call.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (call.opname in ("STORE_DEREF", "DELETE_DEREF") and call.argval in code.co_freevars)
        for call in dis.get_instructions(code)
    )


def _held_by(function: Any) -> Iterator[Any]:
    if isinstance(function, types.MethodType):
        yield from (function.__self__, function.__func__)
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    else:
        yield from (cell.cell_contents for cell in _full(function.__closure__ or ()))
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()


def _full(cells: tuple[types.CellType, ...]) -> Iterator[types.CellType]:
    for cell in cells:
        try:
            cell.cell_contents  # noqa: B018  (raises if nothing has been assigned yet)
        except ValueError:
            continue
        yield cell


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
        full = {id(cell): cell for cell in _full(cells)}
        # Other variables are shared, because functions that are not rebuilt may assign to them.
        changed = {
            place: types.CellType()
            for place, cell in full.items()
            if id(cell.cell_contents) in self.copies or self._is_made_anew(cell.cell_contents)
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
        made.__kwdefaults__ = named and {n: self.copy_of(held) for n, held in named.items()}
        for place, cell in changed.items():
            cell.cell_contents = self.copy_of(full[place].cell_contents)
