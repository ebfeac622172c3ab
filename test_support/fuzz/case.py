"""A case: a network and a training loop as data, small enough to be drawn, shrunk and compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One use of a form of layer; `number` makes its names unlike those of all others."""

    form: str
    number: int


@dataclass(frozen=True)
class Block:
    """Some layers in a row: a submodule of its own, or lines of the root's forward."""

    layers: tuple[Layer, ...]
    own: bool = True  # a module, or lines of the root
    residual: bool = False  # its result is added to its input
    calls: int = 1  # how often the root calls it in a row
    shown: bool = False  # its result is an output, too
    checkpointed: bool = False


@dataclass(frozen=True)
class Network:
    """A root module that calls its blocks one after the other."""

    kind: str  # of its input: a name in `layers.KINDS`
    blocks: tuple[Block, ...]
    result: str = "one"  # what it returns: a name in `script.RESULTS`


@dataclass(frozen=True)
class Event:
    """One thing that a training loop does: a form in `events.py`, and what it is drawn with."""

    form: str
    size: int = 4  # of the batch
    seed: int = 1  # of its numbers
    loss: str = "mean square"  # a name in `events.LOSSES`
    flag: bool = False
    number: float | bool = 2.0  # a value, where the form needs one
    change: int = 0  # which change of which layer


@dataclass(frozen=True)
class Case:
    """What is run twice."""

    network: Network
    events: tuple[Event, ...]
    budget: int | float = (
        1.0  # a fraction; the smallest one that is accepted, where it is too small
    )
    planner: str = "recompute_all"
    how: str = "Rockmate"  # or "apply", "apply_to_blocks"
    self_test: bool = False
    beside: str = ""  # what else a plan may do: a name in `judging.BESIDE`
    size: int = 4  # of the sample
    seed: int = 0  # of the weights
