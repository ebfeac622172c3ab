"""A seed becomes a case: always the same one."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from fuzz.case import Block, Case, Event, Layer, Network
from fuzz.events import EVENTS, LOSSES
from fuzz.judging import BESIDE
from fuzz.layers import BASES, Form
from fuzz.layers_that_read import FORMS, PLAIN
from fuzz.script import RESULTS, changes_of

# With room for everything, nothing that comes later is refused, and what recomputes is taken
# though; the other half tests the promise.
WAYS: tuple[tuple[str, int | float], ...] = (
    *(("recompute_all", 2**20), ("recompute_all", 2**20), ("recompute_all", 2**20)),
    *(("recompute_all", 0.01), ("chen", 2**20), ("none", 1.0), ("chen", 0.8), ("chen", 0.01)),
    *(("segments", 0.7), ("auto", 0.7)),
)
# What may be moved or cut is found where a plan has to be small.
SMALL_WAYS: tuple[tuple[str, int | float], ...] = (
    *(("segments", 0.7), ("segments", 0.4), ("auto", 0.6), ("recompute_all", 0.01)),
)
SIZES = (4, 4, 4, 4, 2, 3, 1, 0)
# Of the plain ones, those whose forward sets something of their own.
SETTING = {name for name in PLAIN if re.search("batch norm|spectral|running|pruned", name)}
NUMBERS = (2.0, 0.25, 3.0, 0.5, True, 1.0)


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    network = _network(chance)
    count = len(list(changes_of(network)))
    events: list[Event] = []
    for _ in range(chance.choice((1, 2, 2, 3, 3, 4))):
        event = _event(chance, count)
        if event.form == "change in between" and any(b.checkpointed for b in network.blocks):
            event = replace(event, form="change")  # a checkpoint would read it again, as said
        if event.form == "backward of one before":
            place = chance.randint(0, len(events))
            events.insert(place, replace(event, form="forward alone"))
        events.append(event)
    if "change" in events[-1].form or "BACKWARD" not in EVENTS[events[-1].form].text:
        events.append(Event("step", seed=chance.randrange(1, 100)))
    planner, budget = chance.choice(WAYS)
    case = Case(
        network,
        tuple(events),
        budget=budget,
        planner=planner,
        how="Rockmate" if chance.random() < 0.8 else "apply",
        self_test=chance.random() < 0.15,
        size=4 if chance.random() < 0.8 else 5,
        seed=chance.randrange(100),
    )
    beside = chance.choice(("",) * 6 + tuple(BESIDE))  # drawn last: it changes no other draw
    if beside:
        planner, budget = chance.choice(SMALL_WAYS)
        case = replace(case, beside=beside, planner=planner, budget=budget)
    if any(block.own for block in network.blocks) and chance.random() < 0.1:
        case = replace(case, how="apply_to_blocks")
    return case


def _network(chance: random.Random) -> Network:
    kind = chance.choice(("rows", "rows", "sequence", "image"))
    plain = {n: f for n, f in FORMS.items() if kind in f.kinds and n in PLAIN}
    odd = {n: f for n, f in FORMS.items() if kind in f.kinds and n not in PLAIN}
    layers: list[str] = []
    for _ in range(chance.choice((1, 2, 3, 3, 4, 5))):
        layers.append(_weighed(chance, plain))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2))):
        layers.insert(chance.randint(0, len(layers)), _weighed(chance, odd))
    layers = [BASES[kind], *layers, BASES[kind]]  # so that something trains and is recomputed
    made = [Layer(form, number) for number, form in enumerate(layers)]
    blocks: list[Block] = []
    while made:
        count = chance.choice((1, 2, 2, 3, 4))
        blocks.append(_block(chance, tuple(made[:count])))
        made = made[count:]
    results = list(RESULTS)
    result = "one" if chance.random() < 0.6 else chance.choice(results)
    return Network(kind, tuple(blocks), result)


def _block(chance: random.Random, layers: tuple[Layer, ...]) -> Block:
    own = chance.random() < 0.5
    keeps_nothing = all(layer.form in PLAIN - SETTING for layer in layers)
    calls = 2 if own and chance.random() < 0.1 else 1
    return Block(
        layers,
        own=own,
        residual=chance.random() < 0.25,
        calls=calls,
        shown=chance.random() < 0.15,
        # A checkpoint runs its forward twice, and sets all this twice; a plan does once, as said.
        checkpointed=own and calls == 1 and keeps_nothing and chance.random() < 0.1,
    )


def _event(chance: random.Random, changes: int) -> Event:
    forms = {n: form.weight for n, form in EVENTS.items() if changes or "CHANGE" not in form.text}
    losses = list(LOSSES)
    return Event(
        chance.choices(list(forms), list(forms.values()))[0],
        size=chance.choice(SIZES) if chance.random() < 0.35 else 4,
        seed=chance.randrange(1, 100),
        loss="mean square" if chance.random() < 0.4 else chance.choice(losses),
        flag=chance.random() < 0.5,
        number=chance.choice(NUMBERS),
        change=chance.randrange(max(changes, 3)),
    )


def _weighed(chance: random.Random, forms: Mapping[str, Form]) -> str:
    names = list(forms)
    return chance.choices(names, [forms[name].weight for name in names])[0]
