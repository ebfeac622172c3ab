"""One plan for all processes that train a network: one process plans, the others use its plan.

Every rank records its own step and looks for a plan under the digest of this recording. The first
rank with a digest plans for it; rank 0 gets a head start. So ranks with another network (stages of
a pipeline), other shapes or another device plan separately, once for all equal ones. A rank waits
only for a planning rank, or for a short time. exchange.py passes the messages, and failures.

    here/RANK           it makes this wrapper
    turn/1              rank 0 has recorded its first step, and begins to plan
    claim/DIGEST        the rank that plans this step
    plan/DIGEST         the file of that plan
    done/RANK           it has all its plans
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import zlib
from collections.abc import Iterator, Sequence

import torch

from rkgb.engine import operations
from rockmate.files.plan_file import PlanFile
from rockmate.guards.sharded import world_size
from rockmate.networks.planned import Planned
from rockmate.requests.exchange import Exchange, exchange_of
from rockmate.requests.request import Request, Source, first_of
from rockmate.requests.saved_plan import not_for, plan_file_of, planned_from, refuse_elsewhere

_log = logging.getLogger("rockmate")
COMING_S = 30.0  # for a rank that has not started yet
_numbers = itertools.count()  # of wrappers, the same on every rank


class AmongRanks:
    """Takes another rank's plan for the same step, or shares the plan from later sources."""

    def __init__(self, exchange: Exchange, beyond: Sequence[Source]) -> None:
        self.exchange, self.beyond = exchange, beyond
        self._round = 0

    def __call__(self, request: Request) -> Planned | None:
        if _talks(request):
            return first_of(self.beyond, request)
        key, exchange = request.key, self.exchange
        self._round += 1
        if exchange.rank:
            first = (f"turn/{self._round}", "done/0", f"claim/{key}")
            exchange.wait_for(COMING_S, *first)
        owner = exchange.claim(f"claim/{key}")
        if exchange.rank == 0:
            exchange.tell(f"turn/{self._round}", b"1")
        if owner != exchange.rank:
            return self._planned_by(owner, request)
        planned = first_of(self.beyond, request)
        if planned is not None:
            file = plan_file_of([planned], request.model)
            exchange.publish(f"plan/{key}", zlib.compress(file.to_json().encode()))
        return planned

    def _planned_by(self, owner: int, request: Request) -> Planned:
        packed = self.exchange.ask(f"plan/{request.key}", owner)
        file = PlanFile.from_json(zlib.decompress(packed).decode())
        refuse_elsewhere(file, request)
        saved = file.plans[0]
        if saved.recording != request.digest:
            raise not_for(saved, request)
        _log.info("rank %d follows the plan of rank %d", self.exchange.rank, owner)
        return planned_from(saved, request)


def _talks(request: Request) -> bool:
    """Return whether a step has collectives, so that one rank alone cannot test it."""
    if request.recorded.graph.basic.opaque:
        return True
    ops = operations(request.recorded.graph)
    return any("c10d" in str(getattr(op.target, "namespace", "")) for op in ops)


def is_follower(share: bool) -> bool:
    """Return whether another rank plans for this one."""
    return share and world_size() > 1 and torch.distributed.get_rank() > 0


@contextlib.contextmanager
def sharing(share: bool) -> Iterator[Exchange | None]:
    """While active, ranks share plans, and an error of one is raised by all.

    Yields None without a process group, or with `share=False`.

    Raises:
        PlanSharingError: a rank has failed; on every rank that makes this wrapper.
    """
    if not share or world_size() < 2:
        yield None
        return
    rank = torch.distributed.get_rank()
    exchange = exchange_of(rank, world_size(), f"rockmate/{next(_numbers)}/")
    try:
        with exchange.living():
            exchange.tell(f"here/{rank}", b"1")
            yield exchange
            exchange.tell(f"done/{rank}", b"1")
            all_came = _wait_for_all(exchange)
    except BaseException as error:
        common = exchange.fail(error)
        if not isinstance(error, Exception):  # the user interrupts this rank
            raise
        raise common from error
    if all_came:
        exchange.clear()


def _wait_for_all(exchange: Exchange) -> bool:
    """Wait until all ranks of this wrapper have their plans; return whether all ranks make it."""
    end = time.monotonic() + COMING_S  # for all together
    absent = []
    for other in range(exchange.size):
        if exchange.wait_for(max(0.0, end - time.monotonic()), f"here/{other}"):
            exchange.ask(f"done/{other}", other)
        else:
            absent.append(other)
    if absent:
        _log.warning(
            "rank %d does not wait for rank %s any more, where no such module is made. With "
            "share=False no rank waits",
            exchange.rank,
            ", ".join(map(str, absent)),
        )
    return not absent
