"""Under torch.distributed one rank plans for all, and the errors of one are the errors of all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rockmate
from oracles.training import assert_same_gradients, eager_copy
from rkgb.copies import LinkRates
from rockmate import InfeasibleBudgetError, PlanSharingError, planners
from rockmate.networks import network, offload
from rockmate.problems.link import Link
from rockmate.requests import ranks
from rockmate.requests.exchange import Exchange
from rockmate.requests.ranks import AmongRanks
from runs.planned import wrap
from runs.processes import run_in_processes


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6)]
    return nn.Sequential(*layers)


class Fails(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.layer = rank, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank:
            raise RuntimeError("no data on this rank")
        return self.layer(x)


def _same_on_all(value: Any) -> bool:
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, value)
    return bool(found[0] == found[1])


def _raised(kind: type[Exception], *args: Any, **options: Any) -> Exception:
    with pytest.raises(kind) as caught:
        wrap(*args, **options)
    assert _same_on_all(str(caught.value))
    return caught.value


def _two_ranks(rank: int) -> None:
    sample = torch.randn(64, 32)  # other values on each rank
    torch.manual_seed(rank)
    plan, measure = planners.plan, network.measure
    if rank == 1:  # which has nothing to plan with
        planners.plan = network.measure = None  # type: ignore[assignment]
    net = _net()
    twin = eager_copy(net)
    ours = wrap(net, sample, 0.6, samples=[sample[:48]])
    steps = [str(planned.plan.steps) for planned in ours._rockmate.plans]
    assert len(steps) == 2
    assert _same_on_all(steps)
    for module in (ours, twin):
        torch.manual_seed(3)
        module(sample).sum().backward()
    assert_same_gradients(net, twin)

    # Over a link that carries all; rank 1 measures nothing, and each has half of it.
    rates = LinkRates(1e12, 1e12, 0.0, is_shared=False)
    offload.measured_link = None if rank else lambda *_: rates  # type: ignore[assignment]
    net = _net()
    twin = eager_copy(net)
    ours = wrap(net, sample, 0.7, offload="host")
    assert ours.plan.plan.moves
    assert ours.plan.problem.link == Link(0.5e12, 0.5e12)
    assert _same_on_all(str((ours.plan.plan.steps, ours.plan.plan.moves)))
    for module in (ours, twin):
        torch.manual_seed(3)
        module(sample).sum().backward()
    assert_same_gradients(net, twin)

    error = _raised(InfeasibleBudgetError, _net(), sample, 10)
    assert isinstance(error, InfeasibleBudgetError)
    assert _same_on_all(error.minimum_bytes)
    # One layer needs all of its peak: within less, the first rank would fail, too.
    error = _raised(PlanSharingError, Fails(rank), sample, "1MiB")
    assert "no data on this rank" in str(error)
    given = "none.plan.json" if rank == 0 else None
    error = _raised(PlanSharingError, _net(), sample, 0.6, plan=given)
    assert "on rank 0 of 2: PlanFileError: cannot read" in str(error)

    # Other shapes, another network (as in stages of a pipeline), another number of samples: each
    # rank plans for itself, and trains exactly.
    planners.plan, network.measure = plan, measure
    sizes = [sample, sample[:24]]
    stages = [_net(), nn.Sequential(_net(), nn.Tanh())]
    for net, given, more in (
        (_net(), sizes[rank], []),
        (stages[rank], sample, []),
        (_net(), sample, [sample[:16]] * rank),
        (_net(), sample, sizes[rank:]),
    ):
        twin = eager_copy(net)
        ours = wrap(net, given, "1MiB", samples=more)
        for module in (ours, twin):
            torch.manual_seed(3)
            module(given).sum().backward()
        assert_same_gradients(net, twin)
    if rank == 0:  # and the other rank does not come, nor is it waited for
        ranks.COMING_S = 0.3
        assert wrap(_net(), sample, "1MiB").plan.overhead == 0


@pytest.mark.slow
def test_rank_0_plans_for_both() -> None:
    run_in_processes(__file__, "_two_ranks")


def _among(rank: int, store: Any) -> Any:
    return AmongRanks(
        Exchange(rank, 4, store, "z/", patience_s=60.0), (lambda request: request.key,)
    )


def test_who_has_the_same_step_follows_and_others_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_talks", lambda _: False)
    file = SimpleNamespace(to_json=lambda: "its plan")
    monkeypatch.setattr(ranks, "plan_file_of", lambda *_: file)
    monkeypatch.setattr(AmongRanks, "_planned_by", lambda _, owner, *__: owner)
    store = torch.distributed.HashStore()
    sources = [_among(rank, store) for rank in range(4)]
    first, second = (SimpleNamespace(key=f"{name} stage", model=None) for name in ("one", "other"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sources[1], first)
        assert not waiting.done(), "rank 0 comes first"
        assert sources[0](first) == "one stage"  # it plans
        assert waiting.result() == 0
    assert sources[2](second) == "other stage"
    assert sources[3](second) == 2
    assert [source.exchange.published for source in sources[:3:2]] == [
        ["plan/one stage"],
        ["plan/other stage"],
    ]
    for source in sources:
        source.exchange.clear()
    assert not sources[1].exchange.has("plan/one stage")


def test_the_first_failure_is_everybodys() -> None:
    store = torch.distributed.HashStore()
    three = [Exchange(rank, 3, store, "x/", patience_s=60.0) for rank in range(3)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(three[rank].ask, "never", 2) for rank in range(2)]
        ours = three[2].fail(ValueError("broken"))
        errors = [waited.exception() for waited in waiting]
    later = three[0].fail(KeyError("later"))
    assert {str(error) for error in (*errors, ours, later)} == {
        "on rank 2 of 3: ValueError: broken"
    }
    assert all(isinstance(error, rockmate.PlanSharingError) for error in errors)


def test_words_arrive() -> None:
    store = torch.distributed.HashStore()
    first, second = (Exchange(rank, 2, store, "y/", patience_s=60.0) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.ask, "plan", 0)
        first.tell("plan", b"\x00text")
        assert waiting.result() == b"\x00text"
    assert second.ask("plan", 0) == b"\x00text"


def test_without_a_process_group_nothing_is_shared() -> None:
    with ranks.sharing(True) as exchange:
        assert exchange is None
    assert not ranks.is_follower(True)
