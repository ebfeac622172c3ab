"""A case becomes the text of a script: a network, `build`, `train`, and what compares two runs.

What is run is what is printed: there is no other way from a case to its network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent

import torch

from fuzz.case import Block, Case, Event, Network
from fuzz.events import EVENTS, LOSSES, TOTALS
from fuzz.layers import KINDS
from fuzz.layers_that_read import FORMS

ROWS = 16  # for each of the batch: what is moved or cut has to matter beside the parameters
RESULTS = {
    "one": "x",
    "tuple": "(x, *shown)",
    "dict": "{'result': x, 'shown': shown}",
    "loss": "x.square().mean()",
    "loss and result": "(x.square().mean(), x)",
    "twice": "(x, x)",
    "with a view": "(x, x[:1])",
    "with the input": "(x, given)",
    "detached": "(x, x.detach())",
    "list": "[x, *shown]",
}

IMPORTS = """\
import array
import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import logging
import operator
import os
import random
import tempfile
import threading
import types
import weakref

import numpy as np
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

"""

HELPERS = {
    "strided": '''\
def strided(x, *rest):
    """Return the same numbers, every other one of a larger tensor."""
    return torch.stack([x, x], -1)[..., 0], *rest


''',
    "other_thread": '''\
@contextlib.contextmanager
def other_thread():
    """Have a thread that prints, draws and computes beside; what is raised there counts."""
    stop, failed = threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                print("", end="")
                DRAWN.random()
                torch.sin(torch.ones(3, requires_grad=True)).sum().backward()
                stop.wait(0.001)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        random.seed(0)
        assert not failed, f"the other thread has failed: {failed[0]!r}"


''',
}


def source_of(case: Case) -> str:
    """Return the network and the loop, without what compares them."""
    parts = ["\n\n".join(_modules(case.network)), _build(case), _train(case)]
    body = "\n\n".join(parts)
    helpers = "".join(text for name, text in HELPERS.items() if f"{name}(" in body)
    # Two threads that draw from one stream get other numbers in each run, without a plan too.
    draws = re.search(r"(?<![.\w])random\.", body) is not None
    helpers = helpers.replace("DRAWN", "random.Random(0)" if draws else "random")
    used = [line for line in IMPORTS.splitlines() if _is_used(line, helpers + body)]
    return "\n".join(used) + "\n\n\n" + helpers + body


def script_of(case: Case, title: str) -> str:
    """Return a program that prints where the two runs differ first; it exits with 1 if they do."""
    quoted = title.replace("\\", "\\\\").replace('"""', "'''")
    return (
        f'"""{quoted}\n\nRun it with the folder test_support on the PYTHONPATH.\n"""\n\n'
        f"{source_of(case)}\n\n"
        'if __name__ == "__main__":\n'
        "    from pathlib import Path\n\n"
        "    from fuzz.judging import Choice, judge\n\n"
        f"{_placed()}"
        f"    verdict = judge(Path(__file__).read_text(), {choice_text(case)})\n"
        "    print(verdict)\n"
        "    raise SystemExit(verdict.is_wrong)\n"
    )


def _placed() -> str:
    where = torch.get_default_device().type
    made = f"    from fuzz.place import run_on\n\n    run_on({where!r})\n"
    return made if where != "cpu" else ""


def choice_text(case: Case) -> str:
    """Return how a case is planned, as an expression."""
    return (
        f"Choice(budget={case.budget}, planner={case.planner!r}, how={case.how!r}, "
        f"self_test={case.self_test}, beside={case.beside!r})"
    )


# ------------------------------------------------------------------------------- the network


def _modules(network: Network) -> Iterator[str]:
    for block in network.blocks:
        for layer in block.layers:
            if FORMS[layer.form].top:
                yield _named(FORMS[layer.form].top, layer.number).rstrip() + "\n"
    takes_k = takes_argument(network)
    given = "x, k" if takes_k else "x"
    for place, block in enumerate(network.blocks):
        if block.own:
            yield _class(f"Block{place}", given, block, "return x")
    init, forward = [], []
    if "given" in RESULTS[network.result]:
        forward.append("given = x")
    if "shown" in RESULTS[network.result]:
        forward.append("shown = []")
    for place, block in enumerate(network.blocks):
        if block.residual:
            forward.append(f"before{place} = x")
        if block.own:
            init.append(f"self.block{place} = Block{place}()")
            call = f"x = self.block{place}({given})"
            if block.checkpointed:
                call = f"x = checkpoint(self.block{place}, {given}, use_reentrant=False)"
            forward += [call] * block.calls
        else:
            for layer in block.layers:
                form = FORMS[layer.form]
                init += [_named(form.init, layer.number)] if form.init else []
                forward.append(_named(form.forward, layer.number))
        if block.residual:
            forward.append(f"x = x + before{place}")
        if block.shown and "shown" in RESULTS[network.result]:
            forward.append("shown.append(x)")
    forward.append(f"return {RESULTS[network.result]}")
    yield _written("Net", "x, k=1.0" if takes_k else "x", init, forward)


def _class(name: str, given: str, block: Block, end: str) -> str:
    forms = [(FORMS[layer.form], layer.number) for layer in block.layers]
    init = [_named(form.init, number) for form, number in forms if form.init]
    return _written(name, given, init, [*(_named(f.forward, n) for f, n in forms), end])


def _written(name: str, given: str, init: list[str], forward: list[str]) -> str:
    made = "\n".join(["super().__init__()", *init])
    done = "\n".join(forward)
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n{indent(made, ' ' * 8)}\n\n"
        f"    def forward(self, {given}):\n{indent(done, ' ' * 8)}\n"
    )


def _build(case: Case) -> str:
    shape = ", ".join(map(str, KINDS[case.network.kind]))
    extra = ", 1.0" if takes_argument(case.network) else ""
    rows = f"{ROWS} * size" if case.beside else "size"
    return (
        "def batch(size, seed):\n"
        "    chance = torch.Generator().manual_seed(seed)\n"
        f"    x = torch.randn({rows}, {shape}, generator=chance, device='cpu')\n"
        "    return x.to(torch.get_default_device())\n\n\n"
        "def build():\n"
        f"    torch.manual_seed({case.seed})\n    return Net(), (batch({case.size}, 0){extra},)\n"
    )


def takes_argument(network: Network) -> bool:
    """Whether the network's forward has a number beside its batch."""
    forms = [FORMS[layer.form].forward for block in network.blocks for layer in block.layers]
    return any(re.search(r"\bk\b", text) for text in forms)


def _named(text: str, number: int) -> str:
    return re.sub(r"_N\b", str(number), text)


# ------------------------------------------------------------------------------- the loop


def _train(case: Case) -> str:
    changes = list(changes_of(case.network))
    texts = []
    for place, event in enumerate(case.events):
        body = event_text(event, changes, takes_k=takes_argument(case.network))
        head = f'with journal.event("{place + 1} {event.form}", model):'
        texts.append(f"{head}\n{indent(body, '    ')}")
    waiting = ["waiting = []"] if any("waiting" in text for text in texts) else []
    optimizer = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    made = [optimizer] if any("optimizer" in text for text in texts) else []
    return (
        "def train(model, journal):\n" + indent("\n".join([*made, *waiting, *texts]), "    ") + "\n"
    )


def changes_of(network: Network) -> Iterator[str]:
    """Yield every statement by which a loop may change what a layer reads."""
    for place, block in enumerate(network.blocks):
        owner = f"model.block{place}" if block.own else "model"
        for layer in block.layers:
            for text in FORMS[layer.form].changes:
                yield _named(text, layer.number).replace("OWN", owner)


def event_text(event: Event, changes: list[str], *, takes_k: bool) -> str:
    """Return the lines of one event."""
    text = EVENTS[event.form].text
    change = changes[event.change % len(changes)] if changes else "pass"
    total = TOTALS.get(event.loss, TOTALS["mean square"])
    extra = f", {event.number}" if takes_k else ""
    for word, meant in (
        ("BACKWARD", LOSSES[event.loss]),
        ("TOTAL", f"({total})"),
        ("CHANGE", change),
        ("CHOICE", str(event.change % 3)),
        ("INPUT", f"x{extra}"),
        ("SIZE", str(event.size)),
        ("SEED", str(event.seed)),
        ("FLAG", str(event.flag)),
        ("VALUE", str(event.number)),
        ("X", f"batch({event.size}, {event.seed}){extra}"),
        ("Y", f"batch({event.size}, {event.seed + 100}){extra}"),
    ):
        text = _replaced(text, word, meant)
    return text.replace("model(strided(", "model(*strided(")


def _replaced(text: str, word: str, meant: str) -> str:
    """Replace a word; lines of what it means are indented as the word is."""

    def line_of(line: str) -> str:
        space = line[: len(line) - len(line.lstrip())]
        return re.sub(rf"\b{word}\b", lambda _: meant.replace("\n", "\n" + space), line)

    return "\n".join(map(line_of, text.split("\n")))


def _is_used(line: str, text: str) -> bool:
    words = line.split()
    return not words or re.search(rf"\b{words[-1]}\b", text) is not None
