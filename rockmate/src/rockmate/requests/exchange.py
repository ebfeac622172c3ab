"""Messages between ranks that plan together, through the store of their process group.

No message is a collective, so a rank that fails reaches all that wait for a message of any rank.

    facts/N/RANK        what it says the N-th time that all exchange facts
    alive/RANK          a heartbeat
    failed              the first failure: the reason
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rkgb.torch_api import group_store
from rockmate.errors import InfeasibleBudgetError, PlanSharingError

Facts = TypeVar("Facts")
PATIENCE_S = 1800.0  # without a heartbeat; less if the process group's time-out is shorter
_SIGNS = 8  # heartbeats in that time
_LOOK_S = 0.02


def exchange_of(rank: int, size: int, prefix: str) -> Exchange:
    """Return the exchange of this rank with the others of the default process group's store."""
    store = group_store()
    return Exchange(rank, size, store, prefix, min(PATIENCE_S, store.timeout.total_seconds()))


@dataclass
class Exchange:
    """Messages between the ranks that plan one network together."""

    rank: int
    size: int
    store: Any
    prefix: str
    patience_s: float = PATIENCE_S
    published: list[str] = field(default_factory=list)
    gathered: int = 0  # how often

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

    def gather(self, facts: Facts) -> list[Facts]:
        """Return the facts of all ranks, in their order; each rank calls this equally often.

        Raises:
            PlanSharingError: a rank has failed, or has not come here for too long.
        """
        self.gathered += 1
        self.tell(f"facts/{self.gathered}/{self.rank}", pickle.dumps(facts))
        found = [facts] * self.size
        for other in range(self.size):
            if other != self.rank:
                found[other] = pickle.loads(self.ask(f"facts/{self.gathered}/{other}", other))
        # All are here, so none still reads what was said the time before.
        self._remove(f"facts/{self.gathered - 1}/{self.rank}")
        return found

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
            self._remove(key)

    def _remove(self, key: str) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self.store.delete_key(self.prefix + key)

    def fail(self, error: BaseException) -> Exception:
        """Tell all ranks that this one has failed, and return the error that all raise."""
        row: dict[str, Any] = {"rank": self.rank, "text": told(error)}
        if isinstance(error, InfeasibleBudgetError):
            row["text"] = str(error)
            row["bytes"] = [error.asked_bytes, error.minimum_bytes, error.bound_bytes]
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
        return self.failure_of(row["rank"], row["text"])

    def failure_of(self, rank: int, text: str) -> PlanSharingError:
        """Return the error that all raise when one rank has failed."""
        return PlanSharingError(f"on rank {rank} of {self.size}: {text}")


def told(error: BaseException) -> str:
    """Return an error as other ranks tell it."""
    return str(error) if isinstance(error, PlanSharingError) else f"{type(error).__name__}: {error}"
