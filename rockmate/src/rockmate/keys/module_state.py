"""What a plan takes for granted about the module: found out once, looked at again at every call.

A recording freezes the modules, their train/eval flags, their attributes and the kind of every
parameter and buffer. Together they are a `ModuleState`, a part of the key of a plan. Taking it is
a walk through the whole module (10 µs a module). A call only looks whether everything is the very
same object as when the walk was made, in loops that run in C (0.4 µs a parameter), and walks again
if something is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.capture import may_run_again
from rkgb.elements import attribute_keyword
from rkgb.graphs import BasicGraph
from rkgb.guards import Held, Same, Sources, Watched, is_users
from rkgb.opaque import is_inside
from rkgb.torch_api import same_kinds

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MORE_OF_HOOKS = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_TABLES = ("_modules", "_parameters", "_buffers")
# What nn.Module keeps for itself, and no forward reads.
_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_compiled_call_impl", "_rockmate"}
# What libraries write on modules for themselves, torch's sharding and compiling among them.
_OTHERS = ("__", "_fsdp", "_is_fsdp", "_is_torch_compile")
Place = tuple[str, str]  # of an attribute: path of its module, and name
_CALLED = frozenset(("forward",))  # methods that torch asks for
_MOST_SNAPSHOTS = 8  # of one module in its states: a GAN's discriminator has two


@dataclass(frozen=True, eq=False)
class ModuleState:
    """One state of a module; equal states of one `ModuleWatch` are one object.

    `facts` says everything by (path, what, name): the content of the key, and the words for it.
    """

    facts: Mapping[tuple[str, str, str], Hashable]
    trains: bool  # a module in it is in train mode
    wants: bool  # a parameter in it requires a gradient

    def unlike(self, other: ModuleState) -> list[str]:
        """Say in words what is otherwise here than in `other`."""
        found = []
        for where in dict.fromkeys((*self.facts, *other.facts)):
            now, then = self.facts.get(where), other.facts.get(where)
            if now != then:
                found.append(_told(*where, now, then))
        return found

    def numbers_unlike(self, other: ModuleState) -> tuple[Place, ...]:
        """Return the attributes, by path and name, that are other numbers here than in `other`.

        None of them where more is otherwise.
        """
        if self.facts.keys() != other.facts.keys():
            return ()
        found = []
        for where, now in self.facts.items():
            then = other.facts[where]
            if now != then:
                path, what, name = where
                if what != "attribute" or not (_is_number(now) and _is_number(then)):
                    return ()
                found.append((path, name))
        return tuple(found)


class ModuleWatch:
    """A module as it is now: `now()` is taken at every call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._recent: list[Snapshot] = []
        self._states: dict[tuple[Any, ...], ModuleState] = {}
        self._ignored: frozenset[str | Place] = frozenset()
        self.sources = Sources()  # what Python reads besides
        self.open: tuple[Place, ...] = ()  # attributes that calls hand over as numbers

    def ignore(self, paths: Sequence[str], names: Sequence[Place] = ()) -> bool:
        """Leave attributes of these submodules, and of those in them, out of states from now on.

        They run whole, so nothing of them is frozen. `names` are single attributes, by the path of
        their module, that every step sets anew. Returns whether that is new.
        """
        new: frozenset[str | Place] = self._ignored | {*paths, *names}
        if new == self._ignored:
            return False
        self._ignored, self._recent = new, []
        return True

    def read(self, sources: Sources) -> bool:
        """Look at these places too from now on. Returns whether that is new."""
        joined = self.sources.joined(sources)
        if joined is self.sources:
            return False
        self.sources, self._recent = joined, []
        return True

    def hand_over(self, names: tuple[Place, ...]) -> None:
        """Leave these attributes out of states from now on: calls hand over their numbers."""
        self.open, self._recent = names, []

    def numbers(self, autocast: Hashable) -> dict[str, Any]:
        """Return the numbers of open attributes by keyword; one that is none is open no more."""
        while self.open:
            snapshot = self.now(autocast)
            found = [snapshot.attribute(*place) for place in self.open]
            if all(type(value) in (float, int) for value in found):
                keywords = (attribute_keyword(*place) for place in self.open)
                return dict(zip(keywords, found, strict=True))
            pairs = zip(self.open, found, strict=True)
            self.hand_over(tuple(p for p, value in pairs if type(value) in (float, int)))
        return {}

    def now(self, autocast: Hashable) -> Snapshot:
        """Return the snapshot that still holds, or a new one; the ones used last come first."""
        recent = self._recent
        if recent and recent[0].holds(autocast):
            return recent[0]
        for place, snapshot in enumerate(recent[1:], 1):
            if snapshot.holds(autocast):
                self._recent = [snapshot, *recent[:place], *recent[place + 1 :]]
                return snapshot
        ignored = self._ignored | {*self.open}
        taken = Snapshot(self.model, self._states, ignored, self.sources)
        others = [s for s in recent if s.state is not taken.state and s.is_of_the_same(taken)]
        self._recent = [taken, *others][:_MOST_SNAPSHOTS]
        return taken

    def forget(self, used: Sequence[ModuleState]) -> None:
        """Forget the states that no plan is for, and what was looked up for plans."""
        kept = {*used, *(snapshot.state for snapshot in self._recent[:1])}
        self._states = {facts: s for facts, s in self._states.items() if s in kept}
        self._recent = [s for s in self._recent if s.state in kept]
        for snapshot in self._recent:
            snapshot.values.clear()


class Snapshot:
    """A state of a module, and what to look at to see whether it still holds."""

    def __init__(
        self,
        model: nn.Module,
        states: dict[tuple[Any, ...], ModuleState],
        ignored: frozenset[str | Place] = frozenset(),
        sources: Sources | None = None,
    ) -> None:
        self.values: dict[Any, ExternalValues] = {}  # for each executor, where its values are
        sources = Sources() if sources is None else sources
        self._watched = Watched(sources.attributes | _CALLED)
        self._tables: list[Mapping[Any, Any]] = []  # of attributes, submodules, tensors, hooks
        self._empty: list[Mapping[Any, Any]] = []
        self._ordered: list[Mapping[Any, Any]] = []  # submodules run in the order of their table
        self._held: list[Tensor] = []
        facts: dict[tuple[str, str, str], Hashable] = {}
        modules = self._by_path = dict(model.named_modules())
        self._paths = {id(module): path for path, module in modules.items()}
        self._tensor_paths: dict[int, str] = {}
        for path, module in modules.items():
            facts[path, "type", ""] = Same(type(module))
            runs_whole = any(is_inside(path, p) for p in ignored if isinstance(p, str))
            if not runs_whole:
                names = {p[1] for p in ignored if not isinstance(p, str) and p[0] == path}
                self._add_attributes(path, module, facts, names)
            self._add_tables(path, module, facts, runs_whole=runs_whole)
        self._modules = list(modules.values())  # kept alive, so that no other gets a place of one
        self._lengths = [*map(len, self._tables)]
        self._orders = [*map(tuple, self._ordered)]
        self._add_sources(sources, [p for p in ignored if isinstance(p, str)], facts)
        unique = {id(t): t for t in self._held}
        self._tensors = list(unique.values())
        self._kinds = [*map(_kind, self._tensors)]
        self._same_kinds: dict[Hashable, Callable[[], bool]] = {}
        self._types = [*map(type, self._modules)]  # parametrizations change it in place
        key = tuple(facts.items())
        if key not in states:
            trains = any(module.training for module in self._modules)
            states[key] = ModuleState(facts, trains, any(t.requires_grad for t in self._tensors))
        self.state = states[key]

    def attribute(self, path: str, name: str) -> Any:
        """Return what a module has as an attribute of its own; None where it has none."""
        module = self._by_path.get(path)
        return None if module is None else vars(module).get(name)

    def holds(self, autocast: Hashable) -> bool:
        """Whether everything is as it was; no exception and no new object in the usual case."""
        if [*map(len, self._tables)] != self._lengths or any(self._empty):
            return False
        if [*map(tuple, self._ordered)] != self._orders:
            return False
        if [*map(type, self._modules)] != self._types:
            return False
        return self._watched.holds() and self._are_of_the_same_kinds(autocast)

    def is_of_the_same(self, other: Snapshot) -> bool:
        """Whether both are of the same modules and tensors, in whatever state."""
        ours, theirs = [*self._modules, *self._tensors], [*other._modules, *other._tensors]
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
        self._tables.append(table)
        for name, value in sorted(table.items()):  # their order means nothing
            if name in _OWN or name in ignored or name.startswith(_OTHERS):
                continue
            facts[path, "attribute", name] = self._watched.worth(value)
            self._watched.note(table, name, value)

    def _add_sources(
        self,
        sources: Sources,
        whole: Sequence[str],
        facts: dict[tuple[str, str, str], Hashable],
    ) -> None:
        """Add what Python reads elsewhere, but for what runs whole and reads it itself."""
        if not sources.attributes and not sources.places:
            return
        for number, (key, source) in enumerate(sources.places.items()):
            if all(any(is_inside(path, p) for p in whole) for path in sources.paths[key]):
                continue
            value = source.read()
            worth = self._watched.worth(value)
            facts[f"{source.told} ({source.where})", "source", str(number)] = worth
            source.watch(self._watched, value)
        kinds = (kind for module in self._modules for kind in type(module).__mro__)
        for kind in dict.fromkeys(kinds):
            if is_users(kind.__module__):
                told = f"class {kind.__module__}.{kind.__qualname__}"
                facts[told, "class", ""] = self._watched.of_class(kind)

    def _note(self, table: Mapping[Any, Any], name: Any, value: Any) -> None:
        if isinstance(value, Tensor):
            self._held.append(value)
        self._watched.note_alive(table, name, value)

    def _add_tables(
        self,
        path: str,
        module: nn.Module,
        facts: dict[tuple[str, str, str], Hashable],
        *,
        runs_whole: bool,
    ) -> None:
        own = vars(module)
        for kind in (*_TABLES, *_HOOKS) if path else _TABLES:
            table = own[kind]
            (self._tables if table else self._empty).append(table)
            if kind == "_modules" and len(table) > 1:
                self._ordered.append(table)
            for name, value in table.items():
                self._note(table, name, value)
                if kind == "_modules":
                    facts[path, "submodule", name] = self._paths.get(id(value))
                elif kind in _TABLES:
                    where = f"{path}.{name}" if path else name
                    # Two names of one tensor: what is known of the first holds for the second.
                    first = self._tensor_paths.setdefault(id(value), where)
                    is_first = value is None or first == where
                    facts[path, "tensor", name] = _kind(value) if is_first else first
                elif not (runs_whole and may_run_again(value)):  # a library puts such in a call
                    facts[path, "hook", f"{kind} {name}"] = Same(value)


class ExternalValues:
    """The values that exist before a step: as long as a snapshot holds, all but inputs stay."""

    def __init__(self, graph: BasicGraph, model: nn.Module) -> None:
        self._inputs = [(name, i) for i, name in enumerate(graph.inputs) if name is not None]
        modules = dict(model.named_modules(remove_duplicate=False))
        self._lasting: dict[str, Tensor] = {}
        for kind, names in (("_parameters", graph.parameters), ("_buffers", graph.buffers)):
            for name, target in names.items():
                path, _, own = target.rpartition(".")
                self._lasting[name] = getattr(modules[path], kind)[own]
        self._lasting.update(graph.constants)

    def now(self, leaves: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return every value by its name; `leaves` are those of (args, kwargs)."""
        values = self._lasting.copy()
        for name, place in self._inputs:
            values[name] = leaves[place]
        return values


def without_hooks(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a module with everything that `model` has but its own hooks, which a call runs."""
    bare: nn.Module = object.__new__(kind)
    table = vars(bare)
    table.update((n, value) for n, value in vars(model).items() if not n.startswith("__"))
    for name in (*_HOOKS, *_MORE_OF_HOOKS):
        if name in table:
            table[name] = type(table[name])()
    table["_compiled_call_impl"] = None
    table.pop("_rockmate", None)
    own: Any = table.get("forward")
    if getattr(own, "__self__", None) is model:
        table["forward"] = own.__func__.__get__(bare)
    return bare


def _kind(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, strides, type(tensor)


def _told(path: str, what: str, name: str, now: Hashable, then: Hashable) -> str:
    module = f"module '{path or '(root)'}'"
    if what in ("attribute", "source"):
        now, then = _apart(now, then)
    if what == "attribute" and name == "training":
        return f"{module} in {'train' if now == (bool, True) else 'eval'} mode"
    if what == "attribute":
        return f"attribute '{name}' of {module} was {_value(then)} and is {_value(now)}"
    if what == "source":
        return f"{path} was {_value(then)} and is {_value(now)}"
    if what == "class":
        return f"attributes of {path}"
    if what == "tensor":
        where = f"{path}.{name}" if path else name
        return f"'{where}' was {_kind_text(then)} and is {_kind_text(now)}"
    if what == "hook":
        return f"hooks of {module}"
    return f"{module}{f': {name}' if name else ''} replaced, added or removed"


def _is_number(worth: Hashable) -> bool:
    return isinstance(worth, tuple) and len(worth) == 2 and worth[0] in (float, int)


def _apart(now: Hashable, then: Hashable) -> tuple[Hashable, Hashable]:
    """Return the first values in two containers or objects that differ."""
    while isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        if _is_value(now) or _is_value(then):
            break
        now, then = next((a, b) for a, b in zip(now, then, strict=True) if a != b)
    return now, then


def _is_value(worth: tuple[Any, ...]) -> bool:
    """Whether that is a type and a plain value."""
    return len(worth) == 2 and isinstance(worth[0], type) and not isinstance(worth[1], tuple)


def _value(worth: Hashable) -> str:
    if worth is None:
        return "missing"
    if isinstance(worth, tuple) and _is_value(worth):
        return repr(float.fromhex(worth[1]) if worth[0] is float else worth[1])[:60]
    return "a tensor" if isinstance(worth, Held) else "another object"


def _kind_text(kind: Hashable) -> str:
    if not isinstance(kind, tuple):
        return f"'{kind}'" if isinstance(kind, str) else "missing"
    dtype, device, requires_grad, shape, _, _ = kind
    frozen = "" if requires_grad else " without gradient"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{frozen}"
