"""The search itself: it repeats a case, shrinks it, prints it, and knows what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuzz import campaign
from fuzz.case import Block, Case, Event, Layer, Network
from fuzz.drawing import draw_case
from fuzz.events import EVENTS, LOSSES
from fuzz.judging import Choice, judge
from fuzz.known import KNOWN
from fuzz.layers import KINDS
from fuzz.layers_that_read import FORMS
from fuzz.script import RESULTS, script_of, source_of
from fuzz.shrinking import shrink

SUPPORT = Path(campaign.__file__).parent.parent
LINEAR, TANH = Layer("linear", 0), Layer("tanh", 1)
SMALL = Case(
    Network("rows", (Block((LINEAR, TANH), own=False), Block((Layer("linear", 2),)))),
    (Event("backward alone"),),
)


def planted(line: str, event: str = "backward alone") -> str:
    """Return a script with one more line at the end of an event."""
    source = source_of(SMALL if event == "backward alone" else loop_of(event))
    assert source.endswith("\n")
    return source + f"        {line}\n"


def loop_of(*events: str) -> Case:
    return replace(SMALL, events=tuple(Event(name) for name in events))


def test_another_thread_draws_from_another_stream_than_a_network_does() -> None:
    case = loop_of("another thread")
    assert "                random.random()\n" in source_of(case)
    drawing = Network("rows", (Block((LINEAR, Layer("backward that draws", 1))),))
    source = source_of(replace(case, network=drawing))
    assert "                random.Random(0).random()\n" in source


def test_a_seed_is_a_case() -> None:
    for seed in range(20):
        assert draw_case(seed) == draw_case(seed)
        compile(source_of(draw_case(seed)), "case.py", "exec")
    assert len({source_of(draw_case(seed)) for seed in range(20)}) == 20


@pytest.mark.slow
def test_a_case_ends_twice_in_the_same_way() -> None:
    first = [campaign.verdict_of(draw_case(seed)) for seed in range(2)]
    assert first == [campaign.verdict_of(draw_case(seed)) for seed in range(2)]


def test_every_form_is_drawn() -> None:
    cases = [draw_case(seed) for seed in range(3000)]
    blocks = [block for case in cases for block in case.network.blocks]
    assert {layer.form for block in blocks for layer in block.layers} == set(FORMS)
    assert {event.form for case in cases for event in case.events} == set(EVENTS)
    assert {event.loss for case in cases for event in case.events} == set(LOSSES)
    assert {case.network.result for case in cases} == set(RESULTS)
    assert {case.network.kind for case in cases} == set(KINDS)


def test_known_faults_are_of_forms() -> None:
    assert set(KNOWN) <= set(FORMS) | set(EVENTS)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_pytorch_runs_every_form(kind: str) -> None:
    for name, form in FORMS.items():
        if kind in form.kinds:
            network = Network(kind, (Block((Layer(name, 3),)),), "tuple")
            space: dict[str, object] = {"__name__": "case"}
            exec(source_of(replace(SMALL, network=network)), space)
            model, sample = space["build"]()  # type: ignore[operator]
            (result,) = model(*sample)
            assert result.shape == sample[0].shape, name


def test_a_small_network_is_equal() -> None:
    assert campaign.verdict_of(SMALL).kind == "equal"


def test_a_silent_difference_is_seen() -> None:
    verdict = judge(planted("journal.add('sum', outs[0].sum() + journal.planned)"), Choice())
    assert verdict.kind == "silent"
    assert verdict.event == "1 backward alone"
    for line in (
        "model.layer0.weight.grad[0, 0] += journal.planned",
        "model.layer0.weight.data[0, 0] += journal.planned",
        "model.layer0.weight.grad = None if journal.planned else model.layer0.weight.grad",
        "model.mark = journal.planned",
        "torch.rand(1 + journal.planned)",
    ):
        assert judge(planted(line), Choice()).kind == "silent", line


def test_a_raw_error_is_seen() -> None:
    verdict = judge(planted("assert not journal.planned, 'planted'"), Choice())
    assert verdict.kind == "raw error"
    assert "planted" in verdict.text


def test_what_a_self_test_finds_is_a_fault() -> None:
    line = "if journal.planned: import rockmate; raise rockmate.SelfTestError('planted')"
    assert judge(planted(line), Choice()).kind == "self-test"


def test_an_error_of_both_is_none() -> None:
    assert judge(planted("raise ValueError('planted')"), Choice()).kind == "equal"


def test_what_is_over_the_budget_is_seen() -> None:
    source = source_of(loop_of("backward alone", "bytes"))
    assert judge(source, Choice(2**14)).kind == "equal"
    greedy = source.replace("def step():", "def step():\n            torch.ones(2**14).sum()")
    assert judge(greedy, Choice(2**14)).kind == "over budget"


def test_a_refusal_is_no_fault() -> None:
    refused = replace(
        SMALL, network=Network("rows", (Block((LINEAR, Layer("external weight", 1))),))
    )
    assert campaign.verdict_of(refused).kind == "refused"


def test_a_planted_fault_is_shrunk() -> None:
    case = next(
        case
        for case in map(draw_case, range(1000))
        if len(case.events) > 3
        and has_dropout(case)
        and any(e.form == "autocast" for e in case.events)
    )

    def shows(smaller: Case) -> bool:
        return has_dropout(smaller) and any(event.form == "autocast" for event in smaller.events)

    small = shrink(case, shows)
    assert [event.form for event in small.events] == ["autocast"]
    (block,) = small.network.blocks
    assert [layer.form for layer in block.layers] == ["dropout"]
    assert (block.own, block.residual, small.network.result) == (False, False, "one")


def has_dropout(case: Case) -> bool:
    return any(layer.form == "dropout" for block in case.network.blocks for layer in block.layers)


@pytest.mark.slow
def test_a_printed_script_shows_the_fault(tmp_path: Path) -> None:
    script = script_of(SMALL, "A planted fault.")
    place = tmp_path / "planted.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}

    def run(text: str) -> subprocess.CompletedProcess[str]:
        place.write_text(text, encoding="utf-8")
        return subprocess.run(
            [sys.executable, str(place)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    good = run(script)
    assert (good.returncode, good.stdout.strip()) == (0, "equal"), good.stderr
    wrong = "model.layer0.weight.grad[0, 0] += journal.planned\n\n\nif __name__"
    bad = run(script.replace("\n\nif __name__", f"        {wrong}"))
    assert bad.returncode == 1, bad.stderr
    assert bad.stdout.startswith("silent at '1 backward alone': gradient of layer0.weight: 1 off")


@pytest.mark.nightly  # make fuzz is a step of CI by itself
def test_a_search_in_two_processes() -> None:
    tally = campaign.search(seed=0, cases=6)
    assert tally.cases == 6
    assert not tally.broken
    expected = [campaign.verdict_of(draw_case(seed)).kind for seed in range(6)]
    assert sum(tally.kinds.values()) == len(expected)
    assert tally.kinds == {kind: expected.count(kind) for kind in expected}


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    campaign.verdict_of(SMALL)
    assert torch.get_num_threads() == before
