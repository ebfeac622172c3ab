"""What the packages give back is one line in a terminal and a view in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import torch
from torch import nn

import rkgb
import rockmate
from rockmate import planning


def test_what_is_public_has_one_line_and_a_view_for_notebooks() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    model, sample = nn.Sequential(*layers), torch.randn(64, 32)
    rk = rockmate.Rockmate(model, sample, 0.9, cost="flops", self_test=False)
    made = rkgb.make_all_graphs(model, sample)
    said = rockmate.estimate(model, sample, device="cpu", points=1)
    problem = rk.plan.problem
    answers = [rk.plan, rk.plans, said, made]
    found = [rk.plan.plan, rk.plan_file(), problem, planning.simulate(problem, rk.plan.steps)]
    graphs = [made.B_graph, made.D_graph, made.S_graph, made.K_graph, made.inspection, made.costs]
    for thing in (*answers, *found, *graphs):
        assert 10 < len(repr(thing)) < 200
        assert "\n" not in repr(thing)
    for thing in (rk, *answers):
        html = thing._repr_html_()
        assert html.startswith("<")
        ET.fromstring(f"<div>{html}</div>")  # each tag is closed
    rockmate.apply(model, budget="1GiB")
    assert model._repr_html_() is None, "there is no plan yet"
