"""A case that shows something becomes the smallest one that still shows the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from fuzz.case import Block, Case
from fuzz.layers import BASES

Part = TypeVar("Part")
Shows = Callable[[Case], bool]


def shrink(case: Case, shows: Shows, *, seconds: float = 60.0) -> Case:
    """Return a case of which no part can be left out or made plainer, or the best within a time."""
    end = time.monotonic() + seconds
    tried = {case}
    before = None
    while case != before and time.monotonic() < end:
        before = case
        for plainer in (_plainer_ways, _fewer_events, _smaller_networks, _plainer_events):
            found = True
            while found:
                found = False
                for smaller in plainer(case):
                    if time.monotonic() > end:
                        break
                    if smaller in tried:
                        continue
                    tried.add(smaller)
                    if shows(smaller):
                        case, found = smaller, True
                        break
    return case


def _fewer_events(case: Case) -> Iterator[Case]:
    for some in _shorter(case.events):
        if some:
            yield replace(case, events=some)


def _smaller_networks(case: Case) -> Iterator[Case]:
    network = case.network
    for some in _shorter(network.blocks):
        if some:
            yield replace(case, network=replace(network, blocks=some))
    for place, block in enumerate(network.blocks):
        for other in _smaller_blocks(block, BASES[network.kind]):
            blocks = (*network.blocks[:place], other, *network.blocks[place + 1 :])
            yield replace(case, network=replace(network, blocks=blocks))
    if network.result != "one":
        yield replace(case, network=replace(network, result="one"))


def _shorter(parts: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """Yield the parts without a half, a quarter … of them, and without each one."""
    size = len(parts) // 2
    while size:
        for start in range(0, len(parts), size):
            yield (*parts[:start], *parts[start + size :])
        size //= 2


def _smaller_blocks(block: Block, base: str) -> Iterator[Block]:
    for layers in _shorter(block.layers):
        if layers:
            yield replace(block, layers=layers)
    for place, layer in enumerate(block.layers):
        if layer.form != base:
            plain = replace(layer, form=base)
            yield replace(block, layers=(*block.layers[:place], plain, *block.layers[place + 1 :]))
    for plainer in (
        replace(block, residual=False),
        replace(block, calls=1),
        replace(block, shown=False),
        replace(block, checkpointed=False),
        replace(block, own=False, calls=1, checkpointed=False),
    ):
        if plainer != block:
            yield plainer


def _plainer_events(case: Case) -> Iterator[Case]:
    for place, event in enumerate(case.events):
        for plainer in (
            replace(event, form="backward alone"),
            replace(event, size=4),
            replace(event, loss="mean square"),
            replace(event, flag=True),
            replace(event, number=2.0),
            replace(event, seed=1),
            replace(event, change=0),
        ):
            yield replace(case, events=(*case.events[:place], plainer, *case.events[place + 1 :]))


def _plainer_ways(case: Case) -> Iterator[Case]:
    """Yield ways to plan that need less to be said, and less time."""
    if case.planner != "none":
        yield replace(case, planner="none", budget=2**20)
        if case.planner != "recompute_all":
            yield replace(case, planner="recompute_all", budget=2**20)
            yield replace(case, planner="recompute_all")
    yield replace(case, how="Rockmate")
    yield replace(case, self_test=False)
    yield replace(case, size=4)
    yield replace(case, seed=0)
