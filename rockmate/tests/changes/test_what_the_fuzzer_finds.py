"""A fault that was mended is found by the fuzzer's forms and events where its mending is taken out.

Each case is what a search would shrink to: what the forms cannot say, no search can find.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest

import rkgb.capture.step
import rkgb.outside.contents
import rkgb.outside.reached
import rockmate.calls.planned_module
import rockmate.networks.executables
import rockmate.networks.planned
from fuzz.campaign import verdict_of
from fuzz.case import Block, Case, Event, Layer, Network
from rkgb.device.rng import RngState
from rkgb.elements.effect import Assign
from rkgb.graphs.basic import BasicGraph
from rkgb.module_state.kept_writes import KeptWrites
from rkgb.opaque.call import Call
from rkgb.outside.changes import Outside
from rockmate.guards.snapshot import Snapshot
from rockmate.runtime.executable import Executable
from rockmate.runtime.steps.saved_tensors import SavedTensors


@dataclass(frozen=True)
class Fault:
    """A case, and the attributes that are replaced so that the mending is gone."""

    case: Case
    without: tuple[tuple[object, str, object], ...]
    seen_as: str = "silent"


def _gives(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _case(layers: str, *events: str | Event, result: str = "one", kind: str = "rows") -> Case:
    """Return a case with these layers between two linear ones; each is a block of its own."""
    names = ("linear", *layers.split(", "), "linear")
    blocks = [
        Block((Layer(name, place),), shown=result == "tuple") for place, name in enumerate(names)
    ]
    drawn = [e if isinstance(e, Event) else Event(e, seed=n) for n, e in enumerate(events, 1)]
    return Case(
        Network(kind, tuple(blocks), result), tuple(drawn), budget=2**20, planner="recompute_all"
    )


_STEPS = ("step", "step", "step")
_NEXT = "gelu, linear, gelu"  # behind a layer that is to be computed again
_NO_SOURCES = (
    (Snapshot, "_add_sources", lambda self, sources, whole, facts: self._add_classes(facts)),
)
_NO_VERSIONS = ((SavedTensors, "check_reads", _gives(None)),)
_NO_CONTENTS = (
    (rockmate.networks.planned, "_contents_of_few", _gives(None)),
    (rockmate.networks.planned, "_all_contents", _gives(None)),
)
_NO_COPIES = ((BasicGraph, "written_roots", frozenset()), *_NO_VERSIONS, *_NO_CONTENTS)
_NOTHING_LENT = ((rkgb.outside.contents, "is_used_up", _gives(False)),)
_NO_PARAMETERS_BACK = ((KeptWrites, "restore", _gives(None)),)


def _changed(layer: str, which: int = 0) -> Case:
    return _case(layer, *_STEPS, Event("change", change=which), "step")


def _two_forwards(layer: str) -> Case:
    return _case(f"{layer}, {_NEXT}", "step", "two forwards, one backward")


FAULTS = {
    # What Python read, and nobody looked at again.
    "a global number": Fault(_changed("global number"), _NO_SOURCES),
    "a table that a global holds": Fault(_changed("global table"), _NO_SOURCES),
    "a variable around a function": Fault(_changed("cell of a closure"), _NO_SOURCES),
    "a default of a function": Fault(_changed("default of a function"), _NO_SOURCES),
    "another tensor in a global": Fault(
        _changed("external tensor", 1), ((Snapshot, "kept", _gives({})),)
    ),
    "another tensor in an attribute": Fault(
        _changed("kept tensor"), ((Snapshot, "kept", _gives({})),)
    ),
    "an iterator": Fault(
        _case("global iterator", *_STEPS),
        ((rkgb.outside.reached, "is_used_up", _gives(False)), *_NOTHING_LENT),
    ),
    "a counter outside": Fault(
        _case("global counter", *_STEPS), ((Outside, "reasons", lambda *a, **k: iter(())),)
    ),
    "a number for what runs whole": Fault(
        _case("branch and argument", "step", Event("step", number=3.0), Event("step", number=0.5)),
        ((Call, "like", lambda self, other, **how: self.is_of_kind(other)),),
    ),
    "forward mode": Fault(
        _case("tanh", "step", "forward mode"),
        ((rockmate.calls.planned_module, "is_transforming", _gives(False)),),
    ),
    # What a recomputation reads is what the forward read.
    "spectral norm before one backward": Fault(_two_forwards("spectral norm"), _NO_COPIES),
    "a running mean": Fault(_two_forwards("running mean"), _NO_COPIES),
    "a codebook": Fault(_two_forwards("codebook"), _NO_COPIES),
    "a tensor changed before the backward": Fault(
        _case(f"kept tensor, {_NEXT}", *_STEPS, Event("change in between", change=1, number=3.0)),
        (*_NO_VERSIONS, *_NO_CONTENTS),
    ),
    "numbers of dropout": Fault(
        _case(f"dropout, {_NEXT}", "step"), ((RngState, "restore", _gives(None)),)
    ),
    "an output changed through its view": Fault(
        _case("tanh", "step", Event("output written", loss="last"), result="with a view"),
        ((SavedTensors, "_check_shared", _gives(None)),),
    ),
    # Tensors that leave early, and hooks.
    "the gradient of a hidden output": Fault(
        _case("tanh, gelu", "step", "output's gradient kept", result="tuple"),
        ((rkgb.capture.step, "flows_of", _gives(())),),
    ),
    "an attribute that each step sets": Fault(
        _case("kept result", "step", "step"), ((Assign, "apply", _gives(None)),)
    ),
    "hooks in order": Fault(
        _case(_NEXT, "step", "order of gradients"),
        (
            (Executable, "for_hooks", lambda self, external: self.backs),
            (rockmate.networks.executables, "fired_in_order", lambda places, edges: places),
        ),
    ),
    # Planning leaves no trace.
    "a weight of unit norm": Fault(_case("weight of unit norm", "step"), _NO_PARAMETERS_BACK),
    "an embedding of bounded norm": Fault(_case("bounded look-up", "step"), _NO_PARAMETERS_BACK),
    # Errors that are not ours.
    "the rail of another kind of backward": Fault(
        _case(_NEXT, "step", Event("step", loss="other layout"), "noise on gradients", "step"),
        ((Executable, "on_rail_of", lambda self, laid, form: self),),
        "raw error",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAULTS)
def test_the_fuzzer_finds_it_where_its_mending_is_taken_out(name):
    fault = FAULTS[name]
    assert not verdict_of(fault.case).is_wrong
    with contextlib.ExitStack() as out:
        for place, attribute, value in fault.without:
            out.enter_context(mock.patch.object(place, attribute, value))
        assert verdict_of(fault.case).kind == fault.seen_as
