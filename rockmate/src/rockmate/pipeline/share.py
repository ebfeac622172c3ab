"""One plan for all processes of a group: rank 0 plans, the others take its plan.

Every rank records its own step, so that what is compared is what will run. Words go through the
store of the process group, key by key, and nobody waits for a collective: whoever fails says so
under one key that all who wait look at, and then all raise the same error.

    round/1/step/RANK   every rank to rank 0: digest of its recording, inputs in words
    round/1/plan        rank 0 to the others: the file of plans, or that each plans alone
    done/RANK           every rank to all: it has all its plans
    failed              the first that fails to all: why
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.engine import operations
from rkgb.torch_api import group_store
from rockmate.errors import InfeasibleBudgetError, PlanSharingError
from rockmate.files.differences import of_inputs
from rockmate.files.plan_file import PlanFile, SavedPlan
from rockmate.pipeline.identity import input_texts, made_with
from rockmate.pipeline.planned import Planned
from rockmate.pipeline.saved_plan import differences, mismatch, plan_file_of, refuse_elsewhere
from rockmate.pipeline.shelf import Asked, Shelf

PATIENCE_S = 1800.0  # as long as torch's process groups wait; rank 0 may be planning
_LOOK_S = 0.02
_ALONE = b"alone"
_numbers = itertools.count()  # of wrappers made under a group: the same on every rank


@dataclass
class Exchange:
    """What the ranks tell each other while one wrapper is made."""

    rank: int
    size: int
    store: Any
    prefix: str
    patience_s: float = field(default_factory=lambda: PATIENCE_S)

    def tell(self, key: str, value: bytes) -> None:
        """Write a value for the others."""
        self.store.set(self.prefix + key, value)

    def ask(self, key: str, from_whom: int) -> bytes:
        """Return what another rank writes, once it has.

        Raises:
            PlanSharingError: a rank has failed, or this one has waited for too long.
        """
        end = time.monotonic() + self.patience_s
        while not self.store.check([self.prefix + key]):
            if self.store.check([self.prefix + "failed"]):
                raise self.failure()
            if time.monotonic() > end:
                raise PlanSharingError(
                    f"rank {self.rank} has waited {self.patience_s:.0f} s for rank {from_whom}. "
                    "Make the Rockmate module on every rank, or with share=False on each alone"
                )
            time.sleep(_LOOK_S)
        return bytes(self.store.get(self.prefix + key))

    def forget(self, key: str) -> None:
        """Take a value away, where the store can."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self.store.delete_key(self.prefix + key)

    def fail(self, error: BaseException) -> Exception:
        """Tell everybody that this rank has failed, and return the error that all raise."""
        row: dict[str, Any] = {"rank": self.rank, "text": str(error)}
        if isinstance(error, InfeasibleBudgetError):
            row["bytes"] = [error.asked_bytes, error.minimum_bytes, error.bound_bytes]
        elif not isinstance(error, PlanSharingError):
            row["text"] = f"{type(error).__name__}: {error}"
        # The first failure is everybody's.
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


class SharedShelf:
    """A shelf that the ranks of a group have together."""

    def __init__(self, exchange: Exchange, beyond: Shelf) -> None:
        self.exchange, self.beyond = exchange, beyond
        self._round = 0
        self._is_alone = False

    def find(self, asked: Asked) -> SavedPlan | None:
        """Return the plan of rank 0; on rank 0 itself what lies beyond, or None."""
        self._round += 1
        basic = asked.recorded.graph.dataflow.basic
        # Steps that talk to other ranks cannot be run by one of them for a test.
        self._is_alone = bool(basic.opaque) or any(
            "c10d" in str(getattr(op.target, "namespace", ""))
            for op in operations(asked.recorded.graph)
        )
        ours = json.dumps([asked.digest, input_texts(basic), self._is_alone])
        self.exchange.tell(f"round/{self._round}/step/{self.exchange.rank}", ours.encode())
        if self.exchange.rank == 0:
            return self._found_by_first(asked, ours)
        packed = self.exchange.ask(f"round/{self._round}/plan", 0)
        if packed == _ALONE:
            return self.beyond.find(asked)
        file = PlanFile.from_json(zlib.decompress(packed).decode())
        refuse_elsewhere(file, asked.model, asked.sample)
        saved = file.plans[0]
        if saved.recording != asked.digest:
            found = differences(saved, asked.model, asked.recorded, asked.sample)
            raise mismatch(type(asked.model).__name__, found)
        return saved

    def keep(self, asked: Asked, planned: Planned) -> None:
        """Keep what rank 0 has planned, and give it to the others."""
        if self.exchange.rank == 0 or self._is_alone:
            self.beyond.keep(asked, planned)
        if self.exchange.rank == 0 and not self._is_alone:
            self._publish(plan_file_of([planned], asked.model))

    def _found_by_first(self, asked: Asked, ours: str) -> SavedPlan | None:
        for rank in range(1, self.exchange.size):
            theirs = self.exchange.ask(f"round/{self._round}/step/{rank}", rank).decode()
            if theirs != ours:
                inputs = of_inputs(json.loads(ours)[1], json.loads(theirs)[1])
                told = "; ".join(text.replace("in the file", "on rank 0") for text in inputs)
                raise PlanSharingError(
                    f"rank {rank} has recorded another step than rank 0 "
                    f"({told.replace('here', f'on rank {rank}') or 'the networks differ'}), and "
                    "cannot follow its plan. Give all ranks one network and one shape of sample, "
                    "or share=False to let each rank plan for itself"
                )
        if self._is_alone:
            self.exchange.tell(f"round/{self._round}/plan", _ALONE)
            return self.beyond.find(asked)
        saved = self.beyond.find(asked)
        if saved is not None:
            here = made_with(asked.sample.device)
            self._publish(PlanFile(type(asked.model).__name__, here, (saved,)))
        return saved

    def clear(self) -> None:
        """Take the plans out of the store, which lives as long as the training."""
        for number in range(1, self._round + 1):
            self.exchange.forget(f"round/{number}/plan")

    def _publish(self, file: PlanFile) -> None:
        packed = zlib.compress(file.to_json().encode())
        self.exchange.tell(f"round/{self._round}/plan", packed)


def is_follower(share: bool) -> bool:
    """Whether another rank plans for this one."""
    return share and _size() > 1 and torch.distributed.get_rank() > 0


def _size() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


@contextlib.contextmanager
def sharing(beyond: Shelf, share: bool) -> Iterator[Shelf]:
    """While active, what one rank plans serves all; errors of one are errors of all.

    Without a process group, or with `share=False`, this is the shelf itself.

    Raises:
        PlanSharingError: a rank cannot follow, has failed, or has not come; on every rank.
    """
    if not share or _size() < 2:
        yield beyond
        return
    rank, size = torch.distributed.get_rank(), _size()
    exchange = Exchange(rank, size, group_store(), f"rockmate/{next(_numbers)}/")
    shelf = SharedShelf(exchange, beyond)
    try:
        yield shelf
        exchange.tell(f"done/{rank}", b"1")
        for other in range(size):
            exchange.ask(f"done/{other}", other)
    except BaseException as error:
        common = exchange.fail(error)
        if not isinstance(error, Exception):  # a person interrupts this rank
            raise
        raise common from error
    if rank == 0:
        shelf.clear()
