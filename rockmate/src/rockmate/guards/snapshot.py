"""Snapshots: a plan's guards on its module, found once and checked at every call.

A recording specialises the modules, their train/eval flags, their attributes and the kind of each
parameter and buffer. Together they are a `WatchedState`, a part of the key of a plan. A snapshot
takes a walk through the whole module (10 µs per module). A call only checks, in loops that run in C
(0.4 µs per parameter), that everything is the same object as in the walk. If not, it walks again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.capture import geometry_of, may_run_again
from rkgb.elements import is_inside_any, storage_id
from rkgb.graphs import BasicGraph
from rkgb.guards import Same, Sources, Watched, is_users
from rkgb.torch_api import same_kinds
from rockmate.guards.module_state import UNDRESSED, Place, WatchedState, module_in_words
from rockmate.guards.tables import Tables

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")
# Attributes that nn.Module has for itself, and that no forward reads.
_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_compiled_call_impl", "_rockmate"}
# Prefixes of attributes that libraries, such as torch's sharding, set on modules for themselves.
_OTHERS = ("__", "_fsdp", "_is_fsdp", "_is_torch_compile")
_CALLED = frozenset(("forward",))  # attributes that torch reads


class Snapshot:
    """A state of a module, and the objects by which to check that it still holds."""

    def __init__(
        self,
        model: nn.Module,
        states: dict[tuple[Any, ...], WatchedState],
        ignored: frozenset[str | Place] = frozenset(),
        sources: Sources | None = None,
    ) -> None:
        self.values: dict[Any, ExternalValues] = {}  # for each executor, where its values are
        sources = Sources() if sources is None else sources
        self._tables = Tables()  # of attributes, submodules, tensors, hooks
        self._held: list[Tensor] = []
        facts: dict[tuple[str, str, str], Hashable] = {}
        modules = self._by_path = dict(model.named_modules())
        self._paths = {id(module): path for path, module in modules.items()}
        self._tensor_paths: dict[int, str] = {}
        asked = sources.attributes | _CALLED
        watched = self._watched = Watched(asked, self._paths, self._tensor_paths)
        whole = [p for p in ignored if isinstance(p, str)]

        def runs_whole(path: str) -> bool:
            return is_inside_any(path, whole)

        for path, module in modules.items():
            facts[path, "type", ""] = Same(_class_of(module))
            self._add_tables(path, module, facts, runs_whole=runs_whole(path))
        asked_beside = sources.asked_beside(runs_whole)  # by what is recorded around them
        self._unread = {
            id(module)
            for path, module in modules.items()
            if runs_whole(path)
            and all(asked_beside.isdisjoint(vars(kind)) for kind in _class_of(module).__mro__[:-1])
        }
        for path, module in modules.items():
            names = {p[1] for p in ignored if not isinstance(p, str) and p[0] == path}
            unread = vars(module).keys() - asked_beside if runs_whole(path) else set()
            self._add_attributes(path, module, facts, names | unread)
        wants = any(tensor.requires_grad for tensor in self._held)
        trains = any(module.training for module in self._tables.modules)
        self._add_sources(sources, runs_whole, facts)
        self.found = watched.found - asked
        for told, module in watched.outside:  # grows while it is walked
            self._add_outside(told, module, sources, facts)
            self._add_classes(facts)
        self._tables.close(watched.tables, watched.objects, watched.fields(), watched.empty)
        unique = {id(t): t for t in self._held}
        self._tensors = list(unique.values())
        if watched.tensors:
            facts["", "memory", ""] = self._shared_memory()
        self._kinds = [*map(_kind, self._tensors)]
        self._same_kinds: dict[Hashable, Callable[[], bool]] = {}
        key = tuple(facts.items())
        if key not in states:
            states[key] = WatchedState(facts, trains, wants)
        self.state = states[key]

    def attribute(self, path: str, name: str) -> Any:
        """Return the value of a module's own attribute, or None if it has none."""
        module = self._by_path.get(path)
        return None if module is None else vars(module).get(name)

    def holds(self, autocast: Hashable) -> bool:
        """Whether nothing has changed; usually this makes no exception and no new object."""
        written = self._tables.written()
        if written is None or not self._tables.hold(written):
            return False
        untouched = self._tables.is_untouched
        if not self._watched.holds(written, untouched=untouched):
            return False
        if not untouched:
            self._tables.pass_over()
        return self._are_of_the_same_kinds(autocast)

    def is_of_the_same(self, other: Snapshot) -> bool:
        """Whether both are of the same modules and tensors, in any states."""
        ours = [*self._tables.modules, *self._tensors]
        theirs = [*other._tables.modules, *other._tensors]
        return len(ours) == len(theirs) and all(map(is_, ours, theirs))

    def _are_of_the_same_kinds(self, autocast: Hashable) -> bool:
        check = self._same_kinds.get(autocast)
        if check is not None and check():
            return True
        if [*map(_kind, self._tensors)] != self._kinds:  # also asked where torch is in some mode
            return False
        if check is None:
            self._same_kinds[autocast] = same_kinds(self._tensors)
        return True

    def _add_attributes(
        self,
        path: str,
        module: nn.Module,
        facts: dict[tuple[str, str, str], Hashable],
        ignored: set[str],
    ) -> None:
        table = vars(module)
        for name, value in sorted(table.items()):  # because their order must not count
            if name in _OWN or name in ignored or name.startswith(_OTHERS):
                continue
            self._watched.where = _of(path, name)
            self._watched.is_read = name in self._watched.asked
            facts[path, "attribute", name] = self._watched.worth(value)
            self._watched.entries(table).note(name, value)
        self._watched.is_read = True

    def _add_sources(
        self,
        sources: Sources,
        runs_whole: Callable[[str], bool],
        facts: dict[tuple[str, str, str], Hashable],
    ) -> None:
        """Add the other places that Python reads, except those that only opaque calls read."""
        if not sources.attributes and not sources.places:
            return
        for number, (key, source) in enumerate(sources.places.items()):
            if all(map(runs_whole, sources.paths[key])) and not source.is_of_tensor:
                continue
            value = source.read()
            self._watched.where = source.told
            worth = self._watched.worth(value)
            facts[source.named, "source", str(number)] = worth
            source.watch(self._watched, value)
        self._add_classes(facts)

    def _add_classes(self, facts: dict[tuple[str, str, str], Hashable]) -> None:
        """Add what counts of the classes of modules, and of tensors."""
        read = [module for module in self._tables.modules if id(module) not in self._unread]
        kinds = [kind for module in read for kind in _class_of(module).__mro__]
        metas = [meta for own in map(type, dict.fromkeys(kinds)) for meta in own.__mro__]
        kinds += [meta for meta in metas if is_users(meta.__module__)]
        for kind in dict.fromkeys((*kinds, Tensor, nn.Parameter)):
            told = f"class {kind.__module__}.{kind.__qualname__}"
            if (told, "class", "") in facts:
                continue
            if is_users(kind.__module__):
                facts[told, "class", ""] = self._watched.of_class(kind)
            elif kind is not object:
                facts[told, "class", ""] = self._watched.of_library(kind)

    def _add_outside(
        self,
        told: str,
        module: nn.Module,
        sources: Sources,
        facts: dict[tuple[str, str, str], Hashable],
    ) -> None:
        """Add a module outside of the model, and its submodules.

        If such a module did not run, only those of its attributes count that Python asks for.
        """
        for own, part in module.named_modules():
            if id(part) in self._paths:
                continue
            path = self._paths[id(part)] = f"{own}{' in ' if own else ''}{told}"
            facts[path, "type", ""] = Same(_class_of(part))
            self._add_tables(path, part, facts, runs_whole=False)
            unread = set() if sources.calls(part) else vars(part).keys() - self._watched.asked
            self._add_attributes(path, part, facts, {*unread})

    def _shared_memory(self) -> tuple[int, ...]:
        """Return for each kept tensor the number of the first tensor that shares its memory."""
        kept = [tensor for ref in self._watched.tensors if (tensor := ref()) is not None]
        places = [_memory(tensor) for tensor in (*self._tensors, *kept)]
        first = {place: number for number, place in reversed([*enumerate(places)])}
        return tuple(first[place] for place in places[len(self._tensors) :])

    def locate(self, executor: object, constants: Mapping[str, Tensor]) -> None:
        """Remember the places of the tensors that a plan for this state reads as constants."""
        every = [*self._tensors, *(ref() for ref in self._watched.tensors)]
        places = {id(tensor): place for place, tensor in enumerate(every)}
        lying = {geometry_of(t): n for n, t in enumerate(every) if t is not None and constants}
        found = {n: places.get(id(t), lying.get(geometry_of(t))) for n, t in constants.items()}
        self.state.kept[executor] = {n: place for n, place in found.items() if place is not None}

    def kept(self, executor: object) -> dict[str, Tensor]:
        """Return the tensors that are at these places now."""
        every = [*self._tensors, *(ref() for ref in self._watched.tensors)]
        found = self.state.kept.get(executor, {})
        tensors = {name: every[place] for name, place in found.items()}
        return {
            n: t.detach() if t.requires_grad else t for n, t in tensors.items() if t is not None
        }

    def _note(self, table: dict[Any, Any], name: Any, value: Any) -> None:
        if isinstance(value, Tensor):
            self._held.append(value)
        self._watched.entries(table).note_alive(name, value)

    def _add_tables(
        self,
        path: str,
        module: nn.Module,
        facts: dict[tuple[str, str, str], Hashable],
        *,
        runs_whole: bool,
    ) -> None:
        for kind, table in self._tables.add(module, (*_TABLES, *HOOKS) if path else _TABLES):
            for name, value in table.items():
                self._note(table, name, value)
                if isinstance(value, Tensor):
                    for own, worth in self._watched.of_tensor(value):
                        facts[path, "of tensor", f"{name}.{own}"] = worth
                if kind == "_modules":
                    facts[path, "submodule", name] = self._paths.get(id(value))
                elif kind in _TABLES:
                    where = f"{path}.{name}" if path else name
                    # The second name of a tensor refers to the first, which has its kind.
                    first = self._tensor_paths.setdefault(id(value), where)
                    is_first = value is None or first == where
                    facts[path, "tensor", name] = _kind(value) if is_first else first
                elif not (runs_whole and may_run_again(value)):  # a library may add it in a call
                    facts[path, "hook", f"{kind} {name}"] = Same(value)


class ExternalValues:
    """The values that exist before a step; while a snapshot holds, only inputs change."""

    def __init__(
        self, graph: BasicGraph, model: nn.Module, kept: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        self._inputs = [(name, i) for i, name in enumerate(graph.inputs) if name is not None]
        modules = dict(model.named_modules(remove_duplicate=False))
        self._lasting: dict[str, Tensor] = {}
        for kind, names in (("_parameters", graph.parameters), ("_buffers", graph.buffers)):
            for name, target in names.items():
                path, _, own = target.rpartition(".")
                self._lasting[name] = getattr(modules[path], kind)[own]
        self._lasting.update(graph.constants)
        self._lasting.update(kept)

    def now(self, leaves: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return every value by its name; `leaves` are those of (args, kwargs)."""
        values = self._lasting.copy()
        for name, place in self._inputs:
            values[name] = leaves[place]
        return values


def _kind(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, strides, type(tensor)


def _class_of(module: nn.Module) -> type:
    """Return the class of a module, or the original if another class replaces it."""
    kind = type(module)
    meant: type = vars(kind).get(UNDRESSED, kind)
    return meant


def _memory(tensor: Tensor) -> int:
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


def _of(path: str, name: str) -> str:
    return f"attribute '{name}' of {module_in_words(path)}"
