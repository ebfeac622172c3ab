"""Casts of weights that autocast caches for a region, so that all calls in it share them.

Plain PyTorch casts a weight once per region. Gradients of all its uses there are summed in the
lower precision, and their sum is cast back. A planned step makes its own casts. If a backward
reaches several steps of one region, gradients of such weights are converted back to the lower
precision (without loss), summed from step to step, and handed over by the last step.

A weight that changes within a region is refused: plain PyTorch goes on with the old cast.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rkgb.graphs import ambient_autocast
from rkgb.torch_api import is_to_run
from rockmate.errors import UnsupportedModuleError
from rockmate.runtime.executable import Executable
from rockmate.runtime.gradients.rails import Rail


class CastingStep(Protocol):
    """A step whose forward has cast weights."""

    region: Any
    rail: Rail | None
    external: Mapping[str, Tensor] | None
    laid_for: Executable
    runs: Executable
    shared: SharedCasts | None

    def casts(self) -> dict[str, int]:
        """Return the weights that are cast, with their ids."""


_steps: weakref.WeakSet[CastingStep] = weakref.WeakSet()


@dataclass
class _Region(threading.local):
    """The last region in which this thread cast weights, and their versions at that time."""

    node: Any = None
    weights: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)


_region = _Region()


def note_casts(step: CastingStep) -> None:
    """Store in a step, before its forward, the autocast region whose casts it would share.

    Raises:
        UnsupportedModuleError: a weight has changed since this region began to cast it.
    """
    autocast = ambient_autocast()
    if autocast is None or not torch.is_autocast_cache_enabled():
        return
    probe = _probe(autocast[0])
    with torch.enable_grad():
        made: Any = torch.mm(probe, probe)
    step.region = made.grad_fn.next_functions[0][0]  # of the cast, which is made once per region
    _steps.add(step)
    if _region.node is not step.region:
        _region.node, _region.weights = step.region, {}
    assert step.external is not None
    for leaf in step.casts():
        weight = step.external[leaf]
        known, version = _region.weights.get(id(weight), (None, 0))
        if known is None or known() is not weight:
            _region.weights[id(weight)] = weakref.ref(weight), weight._version
        elif version != weight._version:
            raise UnsupportedModuleError(
                "leave the autocast region before the optimizer steps, and enter another for the "
                f"next forward: '{step.laid_for.told(leaf)}' has changed since this region cast it "
                "first, and plain PyTorch computes with the old cast until the region ends. With "
                "torch.autocast(..., cache_enabled=False) it casts every time."
            )


@functools.cache
def _probe(device: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, 0, device=device, requires_grad=True)


def shared_casts(step: CastingStep) -> SharedCasts | None:
    """Return the sums for weights that several steps of the present backward cast, or None.

    Raises:
        UnsupportedModuleError: a step uses such a weight several times, or has opaque calls.
    """
    own = step.shared
    if own is not None and own.is_awaited(step):
        return own
    others = [
        other
        for other in list(_steps)
        if other is not step
        and other.region is step.region
        and other.rail is not None
        and other.external is not None
        and is_to_run(other.rail.start)
    ]
    if not others:
        return None
    casts = {one: one.casts() for one in (step, *others)}
    counts: dict[int, int] = {}
    for leaves in casts.values():
        for key in leaves.values():
            counts[key] = counts.get(key, 0) + 1
    shared = {key for key, count in counts.items() if count > 1}
    if not shared:
        return None
    for one, leaves in casts.items():
        for leaf, key in leaves.items():
            if key in shared and leaf not in one.laid_for.casts.once:
                raise _refusal(one.laid_for.told(leaf))
    made = SharedCasts(casts, shared)
    for one in casts:
        one.shared = made
    return made


def _refusal(name: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        "a backward comes to several forwards of Rockmate modules in one autocast region. Plain "
        f"PyTorch casts '{name}' once a region and adds up the gradients of all its uses in the "
        "lower precision, in an order that these plans do not keep. Enter an autocast region for "
        "each forward, call backward for each loss by itself, use torch.autocast(..., "
        "cache_enabled=False), or run these forwards under `with rockmate.plain():`."
    )


class SharedCasts:
    """The sums of gradients, in one backward, of weights that several of its steps cast."""

    def __init__(self, casts: dict[CastingStep, dict[str, int]], shared: set[int]) -> None:
        keys = {one: {n: k for n, k in own.items() if k in shared} for one, own in casts.items()}
        self._waiting = weakref.WeakKeyDictionary(keys)  # steps -> weights still to come
        self._begun: weakref.WeakSet[CastingStep] = weakref.WeakSet()
        self._sums: dict[int, Tensor] = {}

    def is_awaited(self, step: CastingStep) -> bool:
        """Return whether a step has not begun in this backward."""
        return step in self._waiting and step not in self._begun

    def begin(self, step: CastingStep) -> None:
        """Note that a step begins."""
        self._begun.add(step)

    def pass_on(
        self, step: CastingStep, slots: Iterable[tuple[int, str, Any]], found: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return what a step hands over; `slots` have the gradients of casts."""
        given, own = list(found), self._waiting[step]
        for slot, leaf, low in slots:
            key = own.pop(leaf, None)
            if key is None:
                continue
            value, total = given[slot], self._sums.pop(key, None)
            if value is not None:
                part = value.to(low)
                total = part if total is None else total + part
            given[slot] = None
            if total is None:
                continue
            if any(key in other.values() for other in self._waiting.values()):
                self._sums[key] = total
            else:
                given[slot] = total.to(step.laid_for.casts.type_of(leaf))
        return tuple(given)

    def finish(self, step: CastingStep) -> None:
        """End a step.

        Raises:
            UnsupportedModuleError: it has not reached a weight, whose sum would be lost, or has
                handed over the gradient in another way.
        """
        left = self._waiting.pop(step, {})
        waiting = {key for other in self._waiting.values() for key in other.values()}
        for leaf, key in left.items():
            if leaf in step.runs.casts.given_leaves or (key in self._sums and key not in waiting):
                raise _refusal(step.laid_for.told(leaf))
