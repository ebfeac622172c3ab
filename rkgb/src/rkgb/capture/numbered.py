"""Makes numbers of a call unspecialised, if they only enter arithmetic.

The step is recorded a second time, with other numbers, which are tracked (`NumberTrace`). Both
recordings must be the same program apart from scalars. Each scalar that differs must equal, bit for
bit in both recordings, a number that Python computed for that operation, or one of a few known
functions of it in torch's code. The computed numbers must also differ between the recordings,
because otherwise they look like constants. If any of this fails, the numbers stay specialised.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rkgb.capture.record import record
from rkgb.elements.numbers import OPERATIONS, Numbers, TapeEntry, unspecialised, values_on
from rkgb.elements.op import Op, Ref
from rkgb.elements.sample import Sample
from rkgb.elements.target import target_of
from rkgb.errors import StopsRecordingError
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.differences import same_but_for_numbers
from rkgb.recording.numbers import NumberTrace, types_watched

_log = logging.getLogger("rkgb")
_STEP = 0.7310585786300049e-3  # distance of the other numbers, which are not round
# Steps from a number to a scalar: (operation, constant, whether the constant comes first).
_Form = tuple[tuple[str, float, bool], ...]
# Functions of a number in torch's own code.
_FORMS: tuple[_Form, ...] = (
    (),
    (("sub", 1.0, True),),  # of dropout, lerp
    (("sub", 1.0, False),),  # of a power
    (("sub", 1.0, True), ("truediv", 1.0, True)),  # of dropout on a GPU
)


@dataclass(frozen=True)
class FollowedNumbers:
    """A recording in which the numbers of the call were tracked."""

    basic: BasicGraph
    trace: NumberTrace
    leaves: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample: Sample,
        known: BasicGraph,
        whole: frozenset[int],
        own: nn.Module,
    ) -> FollowedNumbers | None:
        """Record a step with numbers near a call's; None if one enters more than arithmetic."""
        kind = known.kind
        other = sample.with_leaves(_others(sample.leaves, whole))
        trace = NumberTrace(whole, (model, own))
        try:
            # A backward may come after the user has set others.
            with sample.keeping_attributes(trace.owners), types_watched(trace):
                basic = record(
                    *(model, other, kind), opaque=known.opaque, known=known, numbers=trace
                )
        except (Exception, StopsRecordingError) as error:
            # A model may not work with tracked numbers.
            _log.debug("numbers are not followed: %s", error)
            return None
        decides = trace.escaped or ("values that Python looks at" if basic.reads else "")
        if decides:
            _log.debug("numbers decide more than arithmetic: %s", decides)
            return None
        return cls(basic, trace, other.leaves)

    def numbered(self, basic: BasicGraph, leaves: Sequence[Any]) -> BasicGraph | None:
        """Return a recording for these leaves with its numbers unspecialised.

        None if there is a difference that does not follow from the numbers by Python's arithmetic.
        """
        ours = self.basic
        if basic.numbers is not None or basic.reads:
            return None
        if not same_but_for_numbers(ours, basic):
            return None
        if not all(map(_takes_the_same, ours.ops, basic.ops)):
            return None
        pairs = zip(ours.outputs, basic.outputs, strict=True)
        if any(not isinstance(b, Ref) and not _is_same(a, b) for a, b in pairs):
            return None
        match = _Match.of(self, leaves)
        if match is None:
            return None
        try:
            ops = _matched(match, ours.ops, basic.ops, self._uses_forward())
            backward = _matched(match, ours.backward, basic.backward, self._uses_backward())
        except _UnknownScalarError:
            return None
        numbers = Numbers(tuple(match.tape), tuple(self.trace.compared), tuple(match.slots))
        if numbers.of(leaves) is None:  # these numbers fail a guard
            return None
        return replace(basic, ops=ops, backward=backward, numbers=numbers)

    def _uses_forward(self) -> list[tuple[int, ...]]:
        return [self.trace.uses.get(place, ()) for place in range(len(self.basic.ops))]

    def _uses_backward(self) -> list[tuple[int, ...]]:
        """Return for each operation of the backward the numbers that its node's forward took."""
        taken: dict[int, dict[int, None]] = {}
        for place, numbers in self.trace.uses.items():
            node = self.basic.ops[place].sequence_nr
            taken.setdefault(node, {}).update(dict.fromkeys(numbers))
        return [tuple(taken.get(op.sequence_nr, ())) for op in self.basic.backward]


def for_any_number(
    basic: BasicGraph,
    model: nn.Module,
    sample: Sample,
    whole: frozenset[int] = frozenset(),
    own: nn.Module | None = None,
) -> BasicGraph:
    """Return a recording, made on `sample`, with its numbers unspecialised if possible.

    The numbers are its floats, and the ints at the positions `whole`. If they decide more than
    scalars, the recording stays specialised. If `model` is a copy of a root, `own` is that root.
    """
    followed = FollowedNumbers.of(model, sample, basic, whole, own or model)
    made = None if followed is None else followed.numbered(basic, sample.leaves)
    return basic if made is None else made


def for_same_numbers(
    basic: BasicGraph, numbers: Numbers, model: nn.Module, sample: Sample, own: nn.Module
) -> BasicGraph:
    """Return a recording of another backward, made on `sample`, with the same `numbers`
    unspecialised.

    If that is not possible, it stays specialised to the numbers of the sample.
    """
    whole = frozenset(made.parts[0] for made in numbers.tape if made.how == "int leaf")
    made = for_any_number(basic, model, sample, whole, own)
    alike = made.numbers is not None and made.numbers.compared == numbers.compared
    return made if alike else basic


class _UnknownScalarError(Exception):
    """A scalar differs for an unknown reason."""


@dataclass(frozen=True)
class _Match:
    """The numbers of both recordings on one tape, and those that the program takes."""

    tape: list[TapeEntry]
    ours: list[Any]
    theirs: list[Any]
    slots: list[int]

    @classmethod
    def of(cls, followed: FollowedNumbers, leaves: Sequence[Any]) -> _Match | None:
        tape = list(followed.trace.tape)
        ours, theirs = values_on(tape, followed.leaves), values_on(tape, leaves)
        if ours is None or theirs is None:
            return None
        match = cls(tape, ours, theirs, [])
        used = {place for places in followed.trace.uses.values() for place in places}
        # A number that is equal in both could not be distinguished from a constant.
        differ = (match.values(form, place) for place in used for form in _FORMS)
        return match if all(v is None or not _is_same(*v) for v in differ) else None

    def number(self, ours: float, theirs: float, taken: Sequence[int]) -> float:
        """Return the number or constant for a scalar with the values `ours` and `theirs`.

        Raises:
            _UnknownScalarError: it is neither, or it could be one of two numbers.
        """
        pairs = ((form, place) for place in taken for form in _FORMS)
        found = [pair for pair in pairs if self._is(pair, ours, theirs)]
        if len(found) == 1:
            return unspecialised(theirs, self._slot(*found[0]))
        if found or not _is_same(ours, theirs):
            raise _UnknownScalarError
        return theirs

    def values(self, form: _Form, place: int) -> tuple[Any, Any] | None:
        """Return a function of a number in both recordings, or None if it is undefined."""
        try:
            return _run(form, self.ours[place]), _run(form, self.theirs[place])
        except ArithmeticError:
            return None

    def _is(self, pair: tuple[_Form, int], ours: float, theirs: float) -> bool:
        values = self.values(*pair)
        return values is not None and _is_same(values[0], ours) and _is_same(values[1], theirs)

    def _slot(self, form: _Form, place: int) -> int:
        """Return the index among the program's numbers of a function of one, adding it if new."""
        for how, constant, swapped in form:
            kept = self._put(TapeEntry("constant", (constant,)), constant)
            parts = (kept, place) if swapped else (place, kept)
            place = self._put(
                TapeEntry(how, parts), _step(how, constant, swapped, self.theirs[place])
            )
        if place not in self.slots:
            self.slots.append(place)
        return self.slots.index(place)

    def _put(self, made: TapeEntry, theirs: Any) -> int:
        if made not in self.tape:
            self.tape.append(made)
            self.theirs.append(theirs)
        return self.tape.index(made)


def _run(form: _Form, x: float) -> Any:
    for how, constant, swapped in form:
        x = _step(how, constant, swapped, x)
    return x


def _step(how: str, constant: float, swapped: bool, x: float) -> Any:
    return OPERATIONS[how](constant, x) if swapped else OPERATIONS[how](x, constant)


def _others(leaves: Sequence[Any], whole: frozenset[int]) -> tuple[Any, ...]:
    """Return leaves with other numbers, all different, near the given ones if these are finite."""

    def other(place: int, leaf: Any) -> Any:
        if place in whole:
            return leaf + 1
        if type(leaf) is not float:
            return leaf
        step = _STEP * (1.0 + math.sqrt(2 + place) % 1)
        return leaf * (1.0 - step) if leaf and math.isfinite(leaf * leaf) else step

    return tuple(other(place, leaf) for place, leaf in enumerate(leaves))


def _matched(
    match: _Match, ours: Sequence[Op], theirs: Sequence[Op], uses: Sequence[Sequence[int]]
) -> tuple[Op, ...]:
    """Return `theirs` with unspecialised numbers for the scalars that differ."""

    def op(a: Op, b: Op, taken: Sequence[int]) -> Op:
        args = _tree(a.args, b.args, lambda x, y: match.number(x, y, taken))
        kwargs = _tree(a.kwargs, b.kwargs, lambda x, y: match.number(x, y, taken))
        is_same = args is b.args and kwargs is b.kwargs
        return b if is_same else replace(b, args=args, kwargs=kwargs)

    return tuple(op(a, b, taken) for a, b, taken in zip(ours, theirs, uses, strict=True))


def _takes_the_same(ours: Op, theirs: Op) -> bool:
    """Return whether two opaque calls differ only in numbers; True for other operations."""
    return target_of(ours).takes_as(theirs.target)


def _tree(ours: Any, theirs: Any, number: Callable[[float, float], float]) -> Any:
    """Return `theirs` with unspecialised numbers; the same object if nothing differs."""
    kind = type(theirs)
    if kind is tuple or kind is list:
        made = kind([_tree(a, b, number) for a, b in zip(ours, theirs, strict=True)])
        return made if any(a is not b for a, b in zip(made, theirs, strict=True)) else theirs
    if isinstance(theirs, Mapping):
        named = {name: _tree(ours[name], value, number) for name, value in theirs.items()}
        return named if any(named[name] is not theirs[name] for name in named) else theirs
    if (kind is float or kind is int) and type(ours) is kind:
        return number(ours, theirs)
    if not isinstance(theirs, Ref) and not _is_same(ours, theirs):
        raise _UnknownScalarError
    return theirs


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    return a.hex() == b.hex() if type(a) is float else bool(a is b or a == b)
