"""A case that shows something becomes the smallest one that still shows the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from fuzz.case import Block, Case, Event

Part = TypeVar("Part")
Shows = Callable[[Case], bool]


def shrink(case: Case, shows: Shows, *, seconds: float = 60.0) -> Case:
    """Return a case of which no part can be left out or made plainer, or the best within a time."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                break
            if smaller != case and shows(smaller):
                case, found = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield plainer cases, those first that leave out most."""
    network, events = case.network, case.events
    for some in _shorter(events):
        if some:
            yield replace(case, events=some)
    for some in _shorter(network.blocks):
        if some:
            yield replace(case, network=replace(network, blocks=some))
    for place, block in enumerate(network.blocks):
        for other in _smaller_blocks(block):
            blocks = (*network.blocks[:place], other, *network.blocks[place + 1 :])
            yield replace(case, network=replace(network, blocks=blocks))
    if network.result != "one":
        for result in ("one", "tuple"):
            if result != network.result:
                yield replace(case, network=replace(network, result=result))
    for place, event in enumerate(events):
        for plainer in _plainer_events(event):
            yield replace(case, events=(*events[:place], plainer, *events[place + 1 :]))
    yield from _plainer_ways(case)


def _shorter(parts: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """Yield the parts without a half, a quarter … of them, and without each one."""
    size = len(parts) // 2
    while size:
        for start in range(0, len(parts), size):
            yield (*parts[:start], *parts[start + size :])
        size //= 2


def _smaller_blocks(block: Block) -> Iterator[Block]:
    for layers in _shorter(block.layers):
        if layers:
            yield replace(block, layers=layers)
    for plainer in (
        replace(block, residual=False),
        replace(block, calls=1),
        replace(block, shown=False),
        replace(block, checkpointed=False),
        replace(block, own=False, calls=1, checkpointed=False),
    ):
        if plainer != block:
            yield plainer


def _plainer_events(event: Event) -> Iterator[Event]:
    for plainer in (
        replace(event, form="backward alone"),
        replace(event, form="forward forgotten"),
        replace(event, size=4),
        replace(event, loss="mean square"),
        replace(event, loss="sum"),
        replace(event, flag=True),
        replace(event, number=2.0),
        replace(event, seed=1),
        replace(event, change=0),
    ):
        if plainer != event and not (event.loss == "sum" and plainer.loss == "mean square"):
            yield plainer


def _plainer_ways(case: Case) -> Iterator[Case]:
    for plainer in (
        replace(case, how="Rockmate"),
        replace(case, self_test=False),
        replace(case, size=4),
        replace(case, seed=0),
        replace(case, planner="recompute_all", budget=2**20),
        replace(case, planner="none", budget=2**20),
    ):
        if plainer != case and not (case.planner == "none" and plainer.planner != "none"):
            yield plainer
