"""Tracks the numbers among the arguments of a call through a forward, while it is recorded.

The forward gets a `Tracked` number in place of each one. A tape records Python's arithmetic with
it, and the outcome of every comparison. Torch gets plain numbers, but only functions with a rule
for the number (`RULES`) may take it. Any other read of the value (a conversion, a text, a function
of `math`, another library) makes it `escape`: the number may decide something unseen, and stays
specialised.

Tracked numbers are no subclass of float, because C code would read the value of one unseen. A call
of `type(...)` cannot be seen either, so code that contains one makes all numbers escape.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F

from rkgb.elements.numbers import COMPARISONS, OPERATIONS, Comparison, TapeEntry
from rkgb.guards.loads import loads_of
from rkgb.torch_api.quiet import set_profile

# (comparison, number): guards, because torch takes another branch at that number.
Limits = tuple[tuple[str, float], ...]
_AT: dict[int | str, Limits] = {1: (), "other": ()}
_ALPHA: dict[int | str, Limits] = {**_AT, "alpha": (("ne", 1.0),)}  # a factor of one is left out
_BOUNDS: dict[int | str, Limits] = {1: (), 2: (), "min": (), "max": ()}
_FILL: dict[int | str, Limits] = {1: (), "fill_value": (), "value": ()}
_MASKED: dict[int | str, Limits] = {2: (), "value": ()}
_EPS: dict[int | str, Limits] = {4: (), "eps": ()}
_EXPONENT: Limits = (("ne", 0.0),)  # another backward
_SHARE: Limits = (("gt", 0.0), ("lt", 1.0))  # dropout of nothing, and of all
_SLOPE: Limits = (("ge", 0.0),)
_TAKING: dict[str, dict[int | str, Limits]] = {
    "mul div true_divide divide multiply __rsub__ rsub __rdiv__ __rtruediv__": _AT,
    "mul_ div_ lt le gt ge eq ne": _AT,
    "add add_ sub sub_ subtract": _ALPHA,
    "pow pow_": {1: _EXPONENT, "exponent": _EXPONENT},
    "clamp clamp_ clip clamp_min clamp_max": _BOUNDS,
    "full full_like fill_": _FILL,
    "new_full": {2: (), "fill_value": ()},
    "masked_fill masked_fill_": _MASKED,
    "where": {1: (), 2: (), "input": (), "other": ()},
    "lerp": {2: (), "weight": ()},
    "softplus": {1: (), 2: (), "beta": (), "threshold": ()},
    "leaky_relu": {1: _SLOPE, "negative_slope": _SLOPE},
    "dropout": {1: _SHARE, "p": _SHARE},
    "layer_norm group_norm": _EPS,
    "scaled_dot_product_attention": {4: _SHARE, "dropout_p": _SHARE},
}
_OWN = ("trace", "place", "__dict__", "__class__", "__copy__", "__deepcopy__")
_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
_PYTHONS = (f"{Path(dis.__file__).parent}{os.sep}", "<frozen")
# Torch's functions that may take tracked numbers, by argument. Within the limits only scalars of
# the same operations, forward and backward, depend on the value.
RULES = {name: places for names, places in _TAKING.items() for name in names.split()}


@dataclass
class NumberTrace:
    """The observed uses of the numbers of a call in one recording."""

    whole: frozenset[int] = frozenset()  # positions of tracked ints among the leaves
    # The module itself: attributes among the leaves are tracked there too, because a function that
    # refers to the module does not read them from the copy.
    owners: Sequence[Any] = ()
    tape: list[TapeEntry] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    compared: dict[Comparison, None] = field(default_factory=dict)
    # The numbers that operations may take, by their places.
    uses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    escaped: str = ""  # how a number escaped

    def begin(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of a call with tracked numbers, and forget an earlier attempt."""
        self.tape, self.values, self.compared, self.uses = [], [], {}, {}
        self.escaped = ""

        def followed(place: int, leaf: Any) -> Any:
            if place in self.whole:
                return self.add(TapeEntry("int leaf", (place,)), leaf)
            return (
                self.add(TapeEntry("float leaf", (place,)), leaf) if type(leaf) is float else leaf
            )

        return tuple(followed(place, leaf) for place, leaf in enumerate(leaves))

    def add(self, made: TapeEntry, value: float) -> Tracked | TrackedWhole:
        """Write a number on the tape."""
        self.tape.append(made)
        self.values.append(value)
        kind = TrackedWhole if type(value) is int else Tracked
        return kind(self, len(self.tape) - 1)

    def place_of(self, number: Any) -> int | None:
        """Return the place of a number on the tape, adding constants; None if it is no number."""
        if is_tracked(number):
            place: int = number.place
            return place
        if type(number) not in (int, float, bool):
            return None
        return self.add(TapeEntry("constant", (number,)), number).place

    def escape(self, how: str) -> None:
        """Note that a value was read in a way that is not tracked."""
        self.escaped = self.escaped or how

    def compute(self, how: str, *numbers: Any) -> Any:
        """Compute with numbers as Python does, and record it on the tape."""
        places = [self.place_of(number) for number in numbers]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return NotImplemented
        try:
            value = OPERATIONS[how](*[self.values[place] for place in known])
        except ArithmeticError:  # the caller may expect it
            self.escape(how)
            raise
        # The sign of an exponent decides whether a power of ints is an int.
        if type(value) is not float and (type(value) is not int or how == "pow"):
            self.escape(how)
            return value
        return self.add(TapeEntry(how, tuple(known)), value)

    def compare(self, how: str, first: Any, second: Any) -> Any:
        """Compare numbers as Python does; the outcome becomes a guard."""
        places = self.place_of(first), self.place_of(second)
        if places[0] is None or places[1] is None:
            return NotImplemented
        outcome = bool(COMPARISONS[how](self.values[places[0]], self.values[places[1]]))
        self.compared[Comparison(how, places[0], places[1], outcome)] = None
        return outcome

    def plain(self, tree: Any, found: list[int]) -> Any:
        """Return arguments with plain numbers; append the places of tracked ones to `found`."""
        kind = type(tree)
        if is_tracked(tree):
            found.append(tree.place)
            return self.values[tree.place]
        if kind is tuple or kind is list:
            return kind([self.plain(item, found) for item in tree])
        return {k: self.plain(v, found) for k, v in tree.items()} if kind is dict else tree

    def check(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], count: int
    ) -> None:
        """Add the limits that a function puts on its `count` tracked arguments."""
        name = getattr(func, "__name__", "")
        rule = RULES.get(name) if _is_torchs(func, name) else None
        given = [*enumerate(args), *kwargs.items()]
        taken: list[tuple[Any, Any]] = [pair for pair in given if is_tracked(pair[1])]
        if rule is None or len(taken) < count or any(where not in rule for where, _ in taken):
            self.escape(name or str(func))
            return
        for where, value in taken:
            for how, limit in rule[where]:
                self.compare(how, value, limit)


@contextlib.contextmanager
def types_watched(trace: NumberTrace) -> Iterator[None]:
    """While active, numbers escape if code outside of torch and rkgb reads a type."""
    seen: set[CodeType] = set()

    before = sys.getprofile()

    def watch(frame: FrameType, event: Any, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if not _is_trusted(code.co_filename) and _asks_for_types(code):
                trace.escape(f"type() in {code.co_name}")
        if callable(before):
            before(frame, event, argument)

    sys.setprofile(watch)
    try:
        yield
    finally:
        set_profile(before)


def _is_trusted(file: str) -> bool:
    return file.startswith(_OURS) or (file.startswith(_PYTHONS) and "site-packages" not in file)


def _asks_for_types(code: CodeType) -> bool:
    return "type" in code.co_names and "type" in loads_of(code).globals


def _is_torchs(func: Callable[..., Any], name: str) -> bool:
    places = ((torch.Tensor, name), (torch.Tensor, f"__{name}__"), (torch, name), (F, name))
    return any(getattr(place, own, None) is func for place, own in places)


class _Followed:
    """A tracked number: an argument of a call, or computed from one."""

    def __init__(self, trace: NumberTrace, place: int) -> None:
        vars(self)["trace"], vars(self)["place"] = trace, place

    trace: NumberTrace
    place: int

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "__torch_function__":  # torch reads it of every argument
            raise AttributeError(name)
        trace: NumberTrace = object.__getattribute__(self, "trace")
        trace.escape(name)
        return getattr(trace.values[self.place], name)

    def __copy__(self) -> _Followed:
        return self

    def __deepcopy__(self, _memo: Any) -> _Followed:
        return self


class Tracked(_Followed, torch.SymFloat):
    """A tracked float.

    Torch's functions accept a SymFloat as a number, and pass it to modes unchanged. To Python it
    claims to be a float.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


class TrackedWhole(_Followed, torch.SymInt):
    """A tracked int, as a SymInt."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


def is_tracked(value: Any) -> bool:
    """Return whether a value is a tracked number."""
    return type(value) is Tracked or type(value) is TrackedWhole


def _binary(how: str, *, swapped: bool = False) -> Callable[[Tracked, Any], Any]:
    if swapped:
        return lambda own, other: own.trace.compute(how, other, own)
    return lambda own, other: own.trace.compute(how, own, other)


def _comparison(how: str) -> Callable[[Tracked, Any], Any]:
    return lambda own, other: own.trace.compare(how, own, other)


def _unary(how: str) -> Callable[[Tracked], Any]:
    return lambda own: own.trace.compute(how, own)


def _escaping(name: str) -> Callable[..., Any]:
    def method(own: Tracked, *args: Any) -> Any:
        own.trace.escape(name)
        return getattr(own.trace.values[own.place], name)(*args)

    return method


def _truth(own: Tracked) -> bool:
    return bool(own.trace.compare("ne", own, 0.0))


def _methods(kind: type) -> dict[str, Any]:
    kept = {"__init__", "__new__", "__getattribute__", "__class__", "__copy__", "__deepcopy__"}
    kept |= {"__doc__", "__init_subclass__", "__subclasshook__", "__setattr__", "__delattr__"}
    kept |= {"__getstate__"}
    names = {*dir(kind), "__complex__", "__index__"}
    methods = {
        name: _escaping(name) for name in names if name.startswith("__") and name not in kept
    }
    for how in OPERATIONS:
        if how in ("neg", "pos", "abs"):
            methods[f"__{how}__"] = _unary(how)
        else:
            methods[f"__{how}__"] = _binary(how)
            methods[f"__r{how}__"] = _binary(how, swapped=True)
    methods |= {f"__{how}__": _comparison(how) for how in COMPARISONS}
    return {**methods, "__bool__": _truth}


for _kind, _of in ((Tracked, float), (TrackedWhole, int)):
    for _name, _method in _methods(_of).items():
        setattr(_kind, _name, _method)
