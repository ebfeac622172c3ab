"""Every end of a measurement is a row of `turns.csv`, and both checkouts take turns."""

from __future__ import annotations

import argparse
import csv
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import rockmate
import visualize
from steps import cases, table, turns, worker
from steps.cases import Subject
from steps.turns import Checkout, Reply, measure, rows_of
from steps.worker import Prepared

ENC = Subject("enc", "step", "enc8", "an encoder", 0.9)
RECOMPUTED = Subject("again", "recomputed", "enc8", "an encoder", 1.2)
CAPTURE = Subject("seen", "capture", "enc8", "an encoder", 1.0)
PLANNED = Subject("held", "planned", "enc8", "an encoder", 3.0, 0.6)
OK = {"status": "ok", "message": ""}
FLAGS = argparse.Namespace(rounds=3, smoke=False, seconds=1.0)


class Scripted(Checkout):
    """A checkout that answers what it was told, and notes who was asked."""

    def __init__(self, which: str, asked: list[str], answer: Callable[[Reply], Reply]) -> None:
        self.which = which
        self.asked = asked
        self.answer = answer

    def ask(self, **request: Any) -> Reply:
        self.asked.append(f"{self.which} {request.get('do', 'open')}")
        return self.answer(request)


def ready(request: Reply) -> Reply:
    if "do" not in request:
        return {"status": "ok", "contenders": {"plain": dict(OK), "rockmate": dict(OK)}}
    return {"status": "ok", "times": {"plain": [2.0, 2.0, 4.0], "rockmate": [3.0, 9.0, 4.0]}}


def test_checkouts_take_turns_in_rounds() -> None:
    asked: list[str] = []
    measure(ENC, [Scripted("A", asked, ready), Scripted("B", asked, ready)], FLAGS)
    turns = ["A turn", "B turn"] * 3
    assert asked == ["A open", "B open", *turns, "A close", "B close"]


def test_ratios_are_taken_pair_by_pair_and_round_by_round() -> None:
    rounds = [
        {"plain": [2.0, 2.0, 4.0], "rockmate": [3.0, 9.0, 4.0]},  # 1.5, 4.5, 1
        {"plain": [1.0], "rockmate": [4.0]},
        {"plain": [1.0], "rockmate": [1.2]},
    ]
    found = turns.step_figures(rounds, "rockmate")
    assert found["time_ratio"] == 1.5
    assert (found["time_ratio_low"], found["time_ratio_high"]) == (1.2, 4.0)
    assert found["measured_overhead_percent"] == 50.0
    assert found["pairs"] == 5


def test_a_crash_in_a_round_is_a_row_of_that_checkout_alone() -> None:
    def dies(request: Reply) -> Reply:
        if request.get("do") == "turn":
            return {"status": "failed", "message": "ended by signal 11"}
        return ready(request)

    asked: list[str] = []
    found = measure(ENC, [Scripted("A", asked, dies), Scripted("B", asked, ready)], FLAGS)
    rows = [rows_of(ENC, reply)[0] for _, reply in found]
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert rows[0]["message"] == "ended by signal 11"
    assert asked.count("A turn") == 1
    assert asked.count("B turn") == 3
    assert "A close" not in asked  # its process has ended


def test_a_refusal_is_a_row_beside_the_other_contenders() -> None:
    refused = {"status": "refused", "message": "why"}
    facts = {"plain": OK, "checkpoint": OK, "rockmate": refused, "rockmate recompute_all": OK}
    times = {"plain": [1.0], "checkpoint": [2.0], "rockmate recompute_all": [1.5]}
    rows = rows_of(RECOMPUTED, {"status": "ok", "contenders": facts, "rounds": [times]})
    assert [(row["strategy"], row["status"]) for row in rows] == [
        ("checkpoint", "ok"),
        ("rockmate", "refused"),
        ("rockmate recompute_all", "ok"),
    ]
    assert rows[1]["message"] == "why"
    assert rows[2]["time_ratio"] == 1.5
    assert [row["target"] for row in rows] == [None, 1.2, 1.2]  # no aim for other people's


def test_nothing_to_compare_takes_no_turn() -> None:
    def infeasible(request: Reply) -> Reply:
        facts = {"plain": OK, "rockmate": {"status": "infeasible", "message": "too small"}}
        return {"status": "ok", "contenders": facts}

    asked: list[str] = []
    [(_, reply)] = measure(PLANNED, [Scripted("A", asked, infeasible)], FLAGS)
    assert asked == ["A open", "A close"]
    [row] = rows_of(PLANNED, reply)
    assert (row["status"], row["message"]) == ("infeasible", "too small")


def test_points_are_measured_less_planned() -> None:
    facts = {"plain": OK, "rockmate": {**OK, "planned_overhead_percent": 20.0}}
    times = {"plain": [2.0], "rockmate": [2.5]}
    [row] = rows_of(PLANNED, {"status": "ok", "contenders": facts, "rounds": [times]})
    assert row["measured_minus_planned_points"] == pytest.approx(5.0)


def test_a_capture_is_made_anew_in_every_round() -> None:
    seconds = iter([3.0, 1.0, 2.0])

    def captured(request: Reply) -> Reply:
        one = next(seconds)
        return {"status": "ok", "times": {"capture_seconds": [one], "plan_seconds": [2 * one]}}

    asked: list[str] = []
    [(_, reply)] = measure(CAPTURE, [Scripted("A", asked, captured)], FLAGS)
    assert asked == ["A open"] * 3
    [row] = rows_of(CAPTURE, reply)
    assert (row["capture_seconds"], row["plan_seconds"]) == (2.0, 4.0)
    assert (row["capture_seconds_low"], row["capture_seconds_high"]) == (1.0, 3.0)


def test_contenders_rotate_and_a_failure_is_noted() -> None:
    order: list[str] = []
    found = Prepared()
    for name in ("plain", "one", "two"):
        found.add(name, lambda facts, name=name: lambda: order.append(name))

    def fails(facts: Reply) -> Callable[[], None]:
        raise ValueError("not this one")

    facts = found.add("three", fails)
    assert facts == {"status": "failed", "message": "ValueError: not this one"}
    order.clear()
    for _ in range(3):
        found.turn()
    assert order == ["plain", "one", "two", "one", "two", "plain", "two", "plain", "one"]


class Fake(nn.Linear):
    """A planned module that needs 9 bytes, fails its self-test and recomputes nothing."""

    plan = types.SimpleNamespace(overhead=0.0, peak_bytes=9)
    planning_seconds: ClassVar = {"capture": 1.0, "search": 2.0}

    def __init__(self, model: nn.Module, sample: object, budget: float, **settings: Any) -> None:
        if budget < 9:
            raise rockmate.InfeasibleBudgetError("no", asked_bytes=4, minimum_bytes=9)
        if settings["self_test"]:
            raise rockmate.SelfTestError("a gradient differs")
        super().__init__(2, 2)
        self.budget_bytes = budget


def test_failed_self_tests_and_least_budgets_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rockmate, "Rockmate", Fake)
    case = cases.StepCase(nn.Linear(2, 2), (torch.ones(1, 2),))
    facts: Reply = {}
    worker.planned(case, 0.5, facts)()
    assert facts["self_test"] == "failed: a gradient differs"
    assert (facts["least_budget"], facts["message"]) == ("yes", "4 bytes are too few: 9 taken")
    assert (facts["capture_seconds"], facts["plan_seconds"]) == (1.0, 3.0)
    row = {"status": "ok", "kind": "step", "time_ratio": "1.5", "flops_ratio": "", **facts}
    assert table.step_figure(row) == "×1.50, in the least budget that fits, self-test failed"
    prepared = Prepared()
    prepared.add("exactly", lambda own: worker.planned(case, 0.5, own, exactly=True))
    assert prepared.facts["exactly"]["status"] == "infeasible"


def test_subjects_are_chosen_by_name_or_part() -> None:
    def names(*only: str) -> list[str]:
        return [subject.name for subject in cases.chosen(only, smoke=False)]

    assert names("enc8") == ["enc8"]  # not recomputed_enc8: it is a whole name
    assert names("enc") == ["enc8", "recomputed_enc8"]
    assert len(names()) == len(set(names())) == len(cases.subjects())
    assert {s.name for s in cases.chosen((), smoke=True)} == set(cases.SMOKE)


def test_networks_are_what_their_names_say() -> None:
    lines = cases.lines(40).model
    assert len(list(lines.parameters())) == 160
    gru = cases.unrolled(20)
    assert gru.model(*gru.sample).shape == (20, 8, 64)
    one, other = (cases.build(ENC, smoke=True) for _ in range(2))
    torch.manual_seed(1)
    first = one.model(*one.sample)
    torch.manual_seed(1)
    assert torch.equal(first, other.model(*other.sample))
    worker.train(one.model, one.sample)
    assert all(parameter.grad is not None for parameter in one.model.parameters())


@pytest.mark.nightly
def test_smoke_measures_this_checkout_and_labels_one_that_is_none(tmp_path: Path) -> None:
    other = tmp_path / "nothing"
    other.mkdir()
    out = tmp_path / "out"
    assert (
        turns.main(["--smoke", "--against", str(other), "--out", str(out)], visualize.draw_all) == 0
    )
    with (out / "step.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["which"] == "this"]
    assert {row["name"] for row in ours} == set(cases.SMOKE)
    assert [row["message"] for row in ours if row["status"] != "ok"] == []
    assert {row["strategy"] for row in ours} == {"rockmate", "checkpoint", "rockmate recompute_all"}
    assert all(table.step_value(row) == table.step_value(row) for row in ours)  # no NaN
    theirs = [row for row in rows if row["which"] == "against"]
    assert {row["name"] for row in theirs} == set(cases.SMOKE)
    assert {row["status"] for row in theirs} == {"failed"}
    assert all("not in the checkout" in row["message"] for row in theirs)
    assert (out / "figures/step-smoke.png").stat().st_size > 5000
    assert "| failed |" in (out / "step.md").read_text(encoding="utf-8")
