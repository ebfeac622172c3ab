"""Follow the numbers among the arguments of a call through a forward, while it is recorded.

In place of each number the forward gets a `Tracked` one. What Python computes with it is written on
a tape, and every comparison is, with its outcome. Torch gets plain numbers: only functions of which
it is known what they do with a number (`RULES`) may take it. Whatever else looks at the value (a
conversion, a text, a function of `math`, another library) makes it `escape`: the number decides
something that nobody sees, and stays part of the key.

Not a subclass of float: C code would read the value of one without anybody seeing it. Nothing tells
that `type(...)` was asked of one, so code that asks for the type of anything lets all escape.
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

# (comparison, number): what must come out as it did, since torch goes another way at that number.
Limits = tuple[tuple[str, float], ...]
_AT: dict[int | str, Limits] = {1: (), "other": ()}
_ALPHA: dict[int | str, Limits] = {**_AT, "alpha": (("ne", 1.0),)}  # a factor of one is left out
_BOUNDS: dict[int | str, Limits] = {1: (), 2: (), "min": (), "max": ()}
_FILL: dict[int | str, Limits] = {1: (), "fill_value": (), "value": ()}
_MASKED: dict[int | str, Limits] = {2: (), "value": ()}
_EPS: dict[int | str, Limits] = {4: (), "eps": ()}
_EXPONENT: Limits = (("ne", 0.0),)  # its backward is another one
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
# Torch's functions that take numbers: in which arguments, and within which limits nothing but
# scalars of the same operations, forward and backward, depends on the value.
RULES = {name: places for names, places in _TAKING.items() for name in names.split()}


@dataclass
class NumberTrace:
    """What was seen of the numbers of a call in one recording."""

    whole: frozenset[int] = frozenset()  # the leaves that are ints and are followed
    # The module itself: attributes among the leaves are followed there, too. A function that was
    # made with the module in it reads them in no copy.
    owners: Sequence[Any] = ()
    tape: list[TapeEntry] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    compared: dict[Comparison, None] = field(default_factory=dict)
    uses: dict[int, tuple[int, ...]] = field(default_factory=dict)  # operation -> what it may take
    escaped: str = ""  # how a number did

    def begin(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of a call with tracked numbers; what an earlier try has seen goes."""
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
        """Return the place of a number on the tape, where a constant is put; None: it is none."""
        if is_tracked(number):
            place: int = number.place
            return place
        if type(number) not in (int, float, bool):
            return None
        return self.add(TapeEntry("constant", (number,)), number).place

    def escape(self, how: str) -> None:
        """Note that a value was seen by what is not followed."""
        self.escaped = self.escaped or how

    def compute(self, how: str, *numbers: Any) -> Any:
        """Compute with numbers as Python does, on the tape."""
        places = [self.place_of(number) for number in numbers]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return NotImplemented
        try:
            value = OPERATIONS[how](*[self.values[place] for place in known])
        except ArithmeticError:  # somebody may expect it
            self.escape(how)
            raise
        # The sign of an exponent decides whether a power of ints is one.
        if type(value) is not float and (type(value) is not int or how == "pow"):
            self.escape(how)
            return value
        return self.add(TapeEntry(how, tuple(known)), value)

    def compare(self, how: str, first: Any, second: Any) -> Any:
        """Compare numbers as Python does; from now on it is to come out so."""
        places = self.place_of(first), self.place_of(second)
        if places[0] is None or places[1] is None:
            return NotImplemented
        outcome = bool(COMPARISONS[how](self.values[places[0]], self.values[places[1]]))
        self.compared[Comparison(how, places[0], places[1], outcome)] = None
        return outcome

    def plain(self, tree: Any, found: list[int]) -> Any:
        """Return arguments with plain numbers, and append the places of those that were tracked."""
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
        """Note what limits a function puts on the `count` numbers that it takes."""
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
    """While active, numbers escape where code that is neither torch's nor ours asks for a type."""
    seen: set[CodeType] = set()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if not _is_trusted(code.co_filename) and _asks_for_types(code):
                trace.escape(f"type() in {code.co_name}")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_trusted(file: str) -> bool:
    return file.startswith(_OURS) or (file.startswith(_PYTHONS) and "site-packages" not in file)


def _asks_for_types(code: CodeType) -> bool:
    return "type" in code.co_names and any(
        line.argval == "type" and line.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for line in dis.get_instructions(code)
    )


def _is_torchs(func: Callable[..., Any], name: str) -> bool:
    places = ((torch.Tensor, name), (torch.Tensor, f"__{name}__"), (torch, name), (F, name))
    return any(getattr(place, own, None) is func for place, own in places)


class _Followed:
    """A number among the arguments of a call, or what was computed from such."""

    def __init__(self, trace: NumberTrace, place: int) -> None:
        vars(self)["trace"], vars(self)["place"] = trace, place

    trace: NumberTrace
    place: int

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "__torch_function__":  # torch asks every argument
            raise AttributeError(name)
        trace: NumberTrace = object.__getattribute__(self, "trace")
        trace.escape(name)
        return getattr(trace.values[self.place], name)

    def __copy__(self) -> _Followed:
        return self

    def __deepcopy__(self, _memo: Any) -> _Followed:
        return self


class Tracked(_Followed, torch.SymFloat):
    """A float that is followed.

    Torch's functions take a SymFloat where they take a number, and hand it to modes as it is; to
    Python it says that it is a float.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


class TrackedWhole(_Followed, torch.SymInt):
    """An int that is followed, as a SymInt."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


def is_tracked(value: Any) -> bool:
    """Whether a value is a number that is followed."""
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
