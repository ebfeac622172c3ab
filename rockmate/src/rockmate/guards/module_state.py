"""The state of a module, which is a part of a plan's key, and its changes in words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from rkgb.guards import Kept, Named

UNDRESSED = "_rockmate_undressed"  # attribute of a class that replaces another: the original
Place = tuple[str, str]  # of an attribute: the path of its module, and its name


@dataclass(frozen=True, eq=False)
class WatchedState:
    """One state of a module; equal states of one `ModuleWatch` are one object.

    `facts` is the content of the key, by (path, what, name). Messages are made of it too.
    """

    facts: Mapping[tuple[str, str, str], Hashable]
    trains: bool  # whether a module in it is in train mode
    wants: bool  # whether a parameter in it requires a gradient
    # For each executor, the tensors of the state that its recording has read as constants.
    kept: MutableMapping[object, Mapping[str, int]] = field(default_factory=WeakKeyDictionary)

    def unlike(self, other: WatchedState) -> list[str]:
        """Return the differences from `other`, in words."""
        found = []
        for where in dict.fromkeys((*self.facts, *other.facts)):
            now, then = self.facts.get(where), other.facts.get(where)
            if now != then:
                found.append(_told(*where, now, then))
        return found

    def numbers_unlike(self, other: WatchedState) -> tuple[Place, ...]:
        """Return the attributes, by path and name, whose numbers differ from those in `other`.

        Returns none if anything else differs too.
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


def module_in_words(path: str) -> str:
    """Return the name of a module in messages, made of its path or of where it was found."""
    own, around, where = path.rpartition(" in ")
    if around:
        return f"module '{own}' in {where}"
    return path if path.endswith("'") or "' of " in path else f"module '{path or '(root)'}'"


def _told(path: str, what: str, name: str, now: Hashable, then: Hashable) -> str:
    module = module_in_words(path)
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
    if what == "memory":
        return "which tensors share their memory"
    if what == "hook":
        return f"hooks of {module}"
    return f"{module}{f': {name}' if name else ''} replaced, added or removed"


def _is_number(worth: Hashable) -> bool:
    return isinstance(worth, tuple) and len(worth) == 2 and worth[0] in (float, int)


def _apart(now: Hashable, then: Hashable) -> tuple[Hashable, Hashable]:
    """Return the first two values in which two containers or objects differ."""
    while isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        if _is_value(now) or _is_value(then):
            break
        now, then = next((a, b) for a, b in zip(now, then, strict=True) if a != b)
    return now, then


def _is_value(worth: tuple[Any, ...]) -> bool:
    """Whether this is a pair of a type and a plain value."""
    return len(worth) == 2 and isinstance(worth[0], type) and not isinstance(worth[1], tuple)


def _value(worth: Hashable) -> str:
    if worth is None:
        return "missing"
    if isinstance(worth, tuple) and _is_value(worth):
        return repr(float.fromhex(worth[1]) if worth[0] is float else worth[1])[:60]
    if isinstance(worth, Kept):
        return f"a tensor ({_kind_text(worth.kind)})"
    if isinstance(worth, Named):
        return f"the tensor '{worth.path}'"
    return "another object"


def _kind_text(kind: Hashable) -> str:
    if not isinstance(kind, tuple):
        return f"'{kind}'" if isinstance(kind, str) else "missing"
    dtype, device, requires_grad, shape = kind[:4]
    frozen = "" if requires_grad else " without gradient"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{frozen}"
