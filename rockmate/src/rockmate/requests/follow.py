"""Plans derived from known ones, for recordings that differ only in numbers or only in sizes."""

from __future__ import annotations

from dataclasses import replace

from rkgb.device import no_collection
from rkgb.graphs import same_but_for_numbers
from rockmate.networks.planned import Planned, with_other_numbers
from rockmate.requests.request import Request, first_of
from rockmate.requests.resized import can_be_resized, resized
from rockmate.requests.versions import ExpectedKind, has_same_nodes, versions_like


def other_numbers(request: Request) -> Planned | None:
    """Use the steps of a known plan for a recording that differs only in numbers."""
    basic = request.recorded.graph.basic
    for version in versions_like(request.known, basic):
        if version.is_apart:
            continue
        known, cut = version.graph, version.planned.network.cut
        cut, recorded = request.cut(None if cut is None else cut.how)
        same = same_but_for_numbers(recorded.graph.basic, known.basic)
        if same and has_same_nodes(recorded.graph, known):
            planned = with_other_numbers(
                *(version.planned, known, recorded, request.sample, request.phases), cut=cut
            )
            request.phases.close("planned before")
            return planned
    return None


def other_sizes(request: Request) -> Planned | None:
    """Derive a plan from known ones for a recording that differs only in sizes."""
    with no_collection():
        planned = resized(request)
    if planned is not None:
        request.phases.close("planned before")
    return planned


def expected_gradients(request: Request) -> Planned | None:
    """Derive a plan from known ones for the unusual gradients that arrived last."""
    if not can_be_resized(request.settings):
        return None
    expected = ExpectedKind.after(request.known)
    if expected is None or expected.is_usual(losses=request.losses):
        return None
    with no_collection():
        return first_of((other_numbers, other_sizes), replace(request, kind=expected))
