"""One plan for all processes that train a network: one process plans, the others use its plan.

Every rank records its own step and looks for a plan under the digest of this recording. The first
rank with a digest plans for it; rank 0 gets a head start. So ranks with another network (stages of
a pipeline), other shapes or another device plan separately, once for all equal ones. Messages go
through the store of the process group. A rank waits only for a planning rank, or for a short time.
A rank that fails writes a key that all waiting ranks read, and all raise the same error.

    here/RANK           it makes this wrapper
    turn/1              rank 0 has recorded its first step, and begins to plan
    claim/DIGEST        the rank that plans this step
    plan/DIGEST         the file of that plan
    done/RANK           it has all its plans
    alive/RANK          a heartbeat
    failed              the first failure: the reason
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.engine import operations
from rkgb.torch_api import group_store
from rockmate.errors import InfeasibleBudgetError, PlanSharingError
from rockmate.files.plan_file import PlanFile
from rockmate.networks.planned import Planned
from rockmate.requests.request import Request, Source, first_of
from rockmate.requests.saved_plan import not_for, plan_file_of, planned_from, refuse_elsewhere

_log = logging.getLogger("rockmate")
PATIENCE_S = 1800.0  # without a heartbeat; less if the process group's time-out is shorter
_SIGNS = 8  # heartbeats in that time
COMING_S = 30.0  # for a rank that has not started yet
_LOOK_S = 0.02
_numbers = itertools.count()  # of wrappers, the same on every rank


@dataclass
class Exchange:
    """Messages between the ranks while one wrapper is made."""

    rank: int
    size: int
    store: Any
    prefix: str
    patience_s: float = field(default_factory=lambda: PATIENCE_S)
    published: list[str] = field(default_factory=list)

    def tell(self, key: str, value: bytes) -> None:
        """Write a value for the other ranks."""
        self.store.set(self.prefix + key, value)

    def has(self, key: str) -> bool:
        """Whether a value has been written."""
        return bool(self.store.check([self.prefix + key]))

    def claim(self, key: str) -> int:
        """Return the rank that was first to claim a value: this one, or another."""
        return int(self.store.compare_set(self.prefix + key, "", str(self.rank)))

    def wait_for(self, seconds: float, *keys: str) -> bool:
        """Return whether one of some values was written within some time.

        Raises:
            PlanSharingError: a rank has failed.
        """
        end = time.monotonic() + seconds
        while not any(map(self.has, keys)):
            if self.has("failed"):
                raise self.failure()
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_S)
        return True

    def ask(self, key: str, from_whom: int) -> bytes:
        """Wait for the value that another rank writes, and return it.

        A planning rank may take any time, as long as it sends heartbeats.

        Raises:
            PlanSharingError: a rank has failed, or the other one has sent no heartbeat for too
            long.
        """
        end, sign = time.monotonic() + self.patience_s, b""
        while not self.wait_for(self.patience_s / _SIGNS, key):
            if (last := self._sign_of(from_whom)) != sign:
                end, sign = time.monotonic() + self.patience_s, last
            if time.monotonic() > end:
                raise PlanSharingError(
                    f"rank {self.rank} has waited {self.patience_s:.0f} s for rank {from_whom}, "
                    "which was planning, or is gone. Look at its log, or plan on each rank alone "
                    "with share=False"
                )
        return bytes(self.store.get(self.prefix + key))

    def _sign_of(self, rank: int) -> bytes:
        key = f"{self.prefix}alive/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """While active, send heartbeats from another thread."""
        over = threading.Event()

        def beat() -> None:
            while not over.is_set():
                with contextlib.suppress(RuntimeError):  # the store may end before this process
                    self.store.add(f"{self.prefix}alive/{self.rank}", 1)
                over.wait(self.patience_s / _SIGNS)

        thread = threading.Thread(target=beat, name="rockmate alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def publish(self, key: str, value: bytes) -> None:
        """Write a large value, to be removed once all ranks have their plans."""
        self.published.append(key)
        self.tell(key, value)

    def clear(self) -> None:
        """Remove published values from the store, which lives as long as the training."""
        for key in self.published:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self.store.delete_key(self.prefix + key)

    def fail(self, error: BaseException) -> Exception:
        """Tell all ranks that this one has failed, and return the error that all raise."""
        row: dict[str, Any] = {"rank": self.rank, "text": str(error)}
        if isinstance(error, InfeasibleBudgetError):
            row["bytes"] = [error.asked_bytes, error.minimum_bytes, error.bound_bytes]
        elif not isinstance(error, PlanSharingError):
            row["text"] = f"{type(error).__name__}: {error}"
        # All ranks raise the first failure.
        self.store.compare_set(self.prefix + "failed", "", json.dumps(row))
        return self.failure()

    def failure(self) -> Exception:
        """Return the first failure of any rank."""
        row = json.loads(self.store.get(self.prefix + "failed"))
        if "bytes" in row:
            asked, minimum, bound = row["bytes"]
            return InfeasibleBudgetError(
                row["text"], asked_bytes=asked, minimum_bytes=minimum, bound_bytes=bound
            )
        return PlanSharingError(f"on rank {row['rank']} of {self.size}: {row['text']}")


class AmongRanks:
    """Takes another rank's plan for the same step, or shares the plan from later sources."""

    def __init__(self, exchange: Exchange, beyond: Sequence[Source]) -> None:
        self.exchange, self.beyond = exchange, beyond
        self._round = 0

    def find(self, request: Request) -> Planned | None:
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
    if request.recorded.graph.dataflow.basic.opaque:
        return True
    ops = operations(request.recorded.graph)
    return any("c10d" in str(getattr(op.target, "namespace", "")) for op in ops)


def is_follower(share: bool) -> bool:
    """Return whether another rank plans for this one."""
    return share and _size() > 1 and torch.distributed.get_rank() > 0


def _size() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


@contextlib.contextmanager
def sharing(share: bool) -> Iterator[Exchange | None]:
    """While active, ranks share plans, and an error of one is raised by all.

    Yields None without a process group, or with `share=False`.

    Raises:
        PlanSharingError: a rank has failed; on every rank that makes this wrapper.
    """
    if not share or _size() < 2:
        yield None
        return
    rank, size = torch.distributed.get_rank(), _size()
    store = group_store()
    patience_s = min(PATIENCE_S, store.timeout.total_seconds())
    exchange = Exchange(rank, size, store, f"rockmate/{next(_numbers)}/", patience_s)
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
