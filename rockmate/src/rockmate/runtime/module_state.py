"""The module as it was planned, and its tensors as they are now.

A recording freezes train/eval flags, plain attributes, the modules themselves and the kind of every
parameter. When one of them differs at a call, running the program would silently compute something
else; so all are compared at every call, with as little Python per module as possible.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rkgb.engine import BasicGraph, plain_attributes
from rockmate.errors import InputMismatchError, UnsupportedModuleError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AGAIN = "Build the Rockmate module anew for the changed module, or undo the change."


class ModuleGuard:
    """The state of a module that a recording froze."""

    def __init__(self, model: nn.Module) -> None:
        refuse_hooks(model)
        self._children: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._modules: list[tuple[str, nn.Module, tuple[str, ...]]] = []
        self._states: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = []
        self._tables: list[tuple[dict[str, Any], int]] = []
        self._hooks: list[Mapping[Any, Any]] = []
        self._tensors: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = []
        self._seen: list[Tensor | None] = []
        self._marks: tuple[list[int], list[bool]] = ([], [])
        for path, module in model.named_modules():
            state = vars(module)
            names = ("training", *(n for n in plain_attributes(module) if n != "training"))
            read = operator.itemgetter(*names)
            self._modules.append((path, module, names))
            self._states.append((state, read, read(state)))
            self._hooks += [state[hooks] for hooks in _HOOKS]
            self._tables.append((module._modules, len(module._modules)))
            for name, child in module._modules.items():
                if child is not None:
                    self._children.append((module._modules, name, child))
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        where = f"{path}.{name}" if path else name
                        self._tensors.append((where, table, name, _kind(tensor)))
        self._planned = [planned for _, _, planned in self._states]

    def check(self) -> None:
        """Compare with the module as it is now.

        Raises:
            InputMismatchError: a submodule, a flag, a number or a parameter's kind has changed.
            UnsupportedModuleError: a hook was added.
        """
        for table, name, child in self._children:
            if table.get(name) is not child:
                raise InputMismatchError(
                    f"submodule '{name}' was replaced since planning. {_AGAIN}"
                )
        try:
            states = [read(state) for state, read, _ in self._states]
        except KeyError:  # an attribute was deleted
            states = []
        if states != self._planned:
            self._explain_state()
        for table, count in self._tables:
            if len(table) != count:
                self._explain_count()
        if any(self._hooks):
            for path, module, _ in self._modules:
                if any(vars(module)[hooks] for hooks in _HOOKS):
                    _refuse_hook(path, module)
        # The same objects with the same memory are of the same kind: a cheap look first.
        found = [table.get(name) for _, table, name, _ in self._tensors]
        same = len(found) == len(self._seen) and all(map(operator.is_, found, self._seen))
        if not same or _marks(found) != self._marks:
            self._check_kinds(found)
            self._seen, self._marks = found, _marks(found)

    def _check_kinds(self, found: Sequence[Tensor | None]) -> None:
        for tensor, (where, _, _, kind) in zip(found, self._tensors, strict=True):
            if tensor is None or _kind(tensor) != kind:
                raise InputMismatchError(
                    f"'{where}' was {_kind_text(kind)} when planned and is "
                    f"{'missing' if tensor is None else _kind_text(_kind(tensor))}. {_AGAIN}"
                )

    def _explain_state(self) -> None:
        for (path, module, names), (state, _, planned) in zip(
            self._modules, self._states, strict=True
        ):
            values = planned if len(names) > 1 else (planned,)
            for name, value in zip(names, values, strict=True):
                if state.get(name) == value:
                    continue
                if name == "training":
                    raise InputMismatchError(
                        f"module '{path or '(root)'}' was switched to "
                        f"{'train' if module.training else 'eval'} mode since planning. {_AGAIN}"
                    )
                raise InputMismatchError(
                    f"attribute '{name}' of module '{path or '(root)'}' was {value!r} when "
                    f"planned and is {state.get(name)!r}. {_AGAIN}"
                )

    def _explain_count(self) -> None:
        for (path, _, _), (table, count) in zip(self._modules, self._tables, strict=True):
            if len(table) != count:
                raise InputMismatchError(
                    f"submodules of '{path or '(root)'}' were added or removed since planning. "
                    f"{_AGAIN}"
                )


class ExternalValues:
    """Where the values that exist before a step are found: tables of modules, and inputs."""

    def __init__(self, graph: BasicGraph, model: nn.Module) -> None:
        self._constants = dict(graph.constants)
        self._inputs = [(name, i) for i, name in enumerate(graph.inputs) if name is not None]
        modules = dict(model.named_modules(remove_duplicate=False))
        self._slots: list[tuple[str, dict[str, Any], str]] = []
        for kind, names in (("_parameters", graph.parameters), ("_buffers", graph.buffers)):
            for name, target in names.items():
                path, _, own = target.rpartition(".")
                self._slots.append((name, getattr(modules[path], kind), own))

    def now(self, leaves: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return every value by its name; `leaves` are those of (args, kwargs)."""
        values = {name: table[own] for name, table, own in self._slots}
        values.update(self._constants)
        for name, place in self._inputs:
            values[name] = leaves[place]
        return values


def _marks(tensors: Sequence[Tensor | None]) -> tuple[list[int], list[bool]]:
    known = [t for t in tensors if t is not None]
    return [t.data_ptr() for t in known], [t.requires_grad for t in known]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, tensor.stride()


def _kind_text(kind: tuple[Any, ...]) -> str:
    dtype, device, requires_grad, shape, _ = kind
    frozen = "" if requires_grad else " without gradient"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{frozen}"


def refuse_hooks(model: nn.Module) -> None:
    """Raise UnsupportedModuleError if a module inside carries hooks, which would not be called."""
    for path, module in model.named_modules():
        if any(vars(module)[hooks] for hooks in _HOOKS):
            _refuse_hook(path, module)


def _refuse_hook(path: str, module: nn.Module) -> None:
    kinds = [hooks.strip("_") for hooks in _HOOKS if vars(module)[hooks]]
    raise UnsupportedModuleError(
        f"module '{path or '(root)'}' ({type(module).__name__}) has {', '.join(kinds)}, which a "
        "plan would not call. Remove them before wrapping; hooks on the wrapper itself and on "
        "parameters work."
    )
