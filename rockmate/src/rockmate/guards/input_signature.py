"""The key of a call: the guards of a plan on its inputs and on torch's global state.

A recording specialises shapes, strides and Python values. If one of them differed at a call, the
program would silently compute something else. So all of them are in the key of a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements import Structure, attribute_of, flatten
from rkgb.engine import Sample
from rkgb.errors import shown
from rkgb.graphs import ambient_autocast
from rkgb.guards import ANY, content_of
from rkgb.torch_api import is_cast_anew, kernel_flags, unusual_facts, written_on

_PLAIN = frozenset((type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size))
_DEVICES = ("cpu", "cuda")
_ANY = "any number"


@dataclass(frozen=True)
class InputSignature:
    """The structure, the autocast region and the device of a call."""

    structure: Structure
    autocast: tuple[str, torch.dtype] | None
    device: torch.device

    @classmethod
    def of(cls, sample: Sample) -> InputSignature:
        return cls(sample.structure, ambient_autocast(), sample.device)

    def sample_of(self, leaves: Sequence[Any]) -> Sample:
        """Return a call with these leaves as a sample."""
        args, kwargs = self.structure.unflatten(leaves)
        return Sample(args, kwargs, tuple(leaves), self.structure, self.device)


def autocast_state() -> Hashable:
    """Return the dtypes of the active autocast regions, and whether casts are cached."""
    active = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    )
    return None if active == (None, None) else (active, torch.is_autocast_cache_enabled())


def ambient() -> tuple[Hashable, Hashable]:
    """Return the settings outside of module and inputs: autocast, and flags that choose kernels."""
    return autocast_state(), kernel_flags()


def in_order(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in the order of their names, because calls may use any order."""
    return dict(sorted(kwargs.items())) if len(kwargs) > 1 else dict(kwargs)


def key_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], asked: frozenset[str] = frozenset()
) -> tuple[list[Any], Hashable]:
    """Return the leaves of (args, kwargs), as `flatten` does, and a key of what they are.

    `kwargs` are in order, and `asked` are the attributes that count of objects that hold more than
    values. Calls with tensors and plain values only, which most are, need no trees.
    """
    leaves = [*args, *kwargs.values()]
    kinds = []
    for leaf in leaves:
        kind = type(leaf)
        if kind is Tensor or kind is nn.Parameter:
            kinds.append(_kind(leaf, asked))
        elif kind in _PLAIN:
            kinds.append((kind, leaf))
        elif kind is float:
            kinds.append((kind, leaf.hex()))  # 0.0 is not -0.0, and nan is nan
        else:
            leaves, structure = flatten((tuple(args), dict(kwargs)))
            return leaves, _Tree(structure, _told_apart(leaves, [_worth(v, asked) for v in leaves]))
    return leaves, (len(args), tuple(kwargs), _told_apart(leaves, kinds))


def _told_apart(leaves: Sequence[Any], kinds: list[Any]) -> tuple[Hashable, ...]:
    """Mark each tensor that is given a second time, because Python may ask `key is value`."""
    if len(set(map(id, leaves))) < len(leaves):
        first: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), place) != place:
                kinds[place] = (*kinds[place], _Again(first[id(leaf)]))
    return tuple(kinds)


@dataclass(frozen=True)
class _Facts:
    """What Python asks a tensor for beside its kind, where it is unusual or written on it."""

    answers: tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class _Again:
    """The tensor is the same object as an input before it."""

    place: int


def for_any_number(key: Hashable, whole: Collection[int]) -> Hashable | None:
    """Return the key of all calls that differ only in floats, and in ints at the places `whole`.

    None if the key has no such number, or if a leaf at one of these places is no int.
    """
    kinds = _kinds_in(key)
    if any(place >= len(kinds) or not _is_of(int, kinds[place]) for place in whole):
        return None
    general = tuple(
        (int, _ANY) if place in whole else (float, _ANY) if _is_of(float, kind) else kind
        for place, kind in enumerate(kinds)
    )
    if general == kinds:
        return None
    return _Tree(key.structure, general) if isinstance(key, _Tree) else (*_shape_of(key), general)


def other_ints(key: Hashable, other: Hashable) -> frozenset[int] | None:
    """Return the places where ints of two keys differ; None if more than numbers differs."""
    ours, theirs = _kinds_in(key), _kinds_in(other)
    if _shape_of(key) != _shape_of(other) or len(ours) != len(theirs):
        return None
    differ = [place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    whole = [at for at in differ if _is_of(int, ours[at]) and _is_of(int, theirs[at])]
    floats = [at for at in differ if _is_of(float, ours[at]) and _is_of(float, theirs[at])]
    return frozenset(whole) if len(whole) + len(floats) == len(differ) else None


def _is_of(number: type, kind: Any) -> bool:
    return isinstance(kind, tuple) and len(kind) == 2 and kind[0] is number


def unlike(now: Hashable, then: Hashable) -> list[str]:
    """Return the differences between the inputs of two keys, in words."""
    ours, theirs = _kinds_in(now), _kinds_in(then)
    if _shape_of(now) != _shape_of(then) or len(ours) != len(theirs):
        return ["arguments of another structure"]
    pairs = zip(ours, theirs, strict=True)
    return [
        f"{_named(now, i)} was {_told(b)} and is {_told(a)}"
        for i, (a, b) in enumerate(pairs)
        if a != b
    ]


def _named(key: Any, place: int) -> str:
    """Return the name of a leaf in messages; numbers of attributes are the last keywords."""
    if not isinstance(key, _Tree):
        count, keywords, _ = key
        attribute = attribute_of(keywords[place - count]) if place >= count else None
        if attribute is not None:
            return f"attribute '{attribute[1]}' of module '{attribute[0] or '(root)'}'"
    return f"input {place}"


def told(key: Hashable) -> str:
    """Return the inputs of a key in words."""
    return ", ".join(map(_told, _kinds_in(key)))


@dataclass(frozen=True)
class _Tree:
    structure: Structure
    kinds: tuple[Hashable, ...]

    def __hash__(self) -> int:  # a structure may hold lists
        return hash(self.kinds)


@dataclass(frozen=True)
class _Value:
    """A leaf of any type: equal where type and content are.

    Unless the content says all there is to say, the leaves have to be equal by themselves, too.
    """

    value: Any
    content: Hashable = field(repr=False)
    says_all: bool = field(repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or type(other.value) is not type(self.value):
            return False
        if self.content != other.content:
            return False
        return self.says_all or bool(self.value is other.value or self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _worth(leaf: Any, asked: frozenset[str]) -> Hashable:
    if isinstance(leaf, Tensor):
        own = type(leaf) in (Tensor, nn.Parameter)
        return _kind(leaf, asked) if own else (*_kind(leaf, asked), type(leaf))
    if type(leaf) is float:
        return float, leaf.hex()
    if type(leaf) in _PLAIN:
        return type(leaf), leaf
    return _Value(leaf, *content_of(leaf, asked))


def _kind(tensor: Tensor, asked: frozenset[str]) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    wants: bool | str = tensor.requires_grad
    if wants and ambient_autocast() is not None and is_cast_anew(tensor):
        wants = "cast anew at every use"
    kind = tensor.dtype, tensor.device, wants, tensor.shape, strides
    found = unusual_facts(tensor, asked)
    if vars(tensor) and (own := written_on(tensor)):
        names = sorted(own.keys() if ANY in asked else own.keys() & asked)
        found += tuple((name, _worth(own[name], asked)) for name in names)
    return (*kind, _Facts(found)) if found else kind


def _kinds_in(key: Any) -> tuple[Hashable, ...]:
    return key.kinds if isinstance(key, _Tree) else key[2]


def _shape_of(key: Any) -> Any:
    return key.structure if isinstance(key, _Tree) else key[:2]


def _told(kind: Any) -> str:
    if isinstance(kind, _Value):
        return shown(kind.value)
    if kind in ((float, _ANY), (int, _ANY)):
        return _ANY
    if len(kind) == 2:
        return shown(float.fromhex(kind[1]) if kind[0] is float else kind[1])
    dtype, device, requires_grad, shape, strides = kind[:5]
    usual = torch.empty(shape, device="meta").stride()
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    text += f" with strides {strides}" if strides != usual else ""
    text += f", the same object as input {kind[-1].place}" if isinstance(kind[-1], _Again) else ""
    facts = next((part for part in kind[5:] if isinstance(part, _Facts)), _Facts(()))
    text += "".join(f", with '{name}'" for name, _ in facts.answers)
    more = f", {requires_grad}" if isinstance(requires_grad, str) else ""
    return text + (f" requiring a gradient{more}" if requires_grad else "")
