"""The frozen rematerialization problem: what the solvers know of a network.

A problem contains only facts: the time of each node, the storages it makes and reads, and the
memory that its forward and backward need while they run. It has no tensors and needs no graph
library or solver. So it can be saved as JSON, solved on another machine, and compared across
commits.

Memory is counted by *storage*, not by tensor: views and in-place results share one. Gradients need
no liveness analysis. Backward steps run in the reverse of the forward order, so the gradient bytes
before each of them do not depend on the plan (`Node.grads_before_bytes`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rockmate.problems.link import Link
from rockmate.problems.rows import from_row, parse, row_of


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory that a node's forward makes.

    `fwd_users` are the nodes whose forward reads it; `bwd_users` are the nodes whose *backward*
    reads it (possibly the producer itself). The only reader of a phantom (a mask, statistics,
    indices) is its producer's backward. An output is returned to the user: it lives from its first
    production to the end of the step under every plan. A movable one may be elsewhere while nothing
    uses it (`schedules.moves`).
    """

    name: str
    size_bytes: int
    producer: int
    fwd_users: tuple[int, ...] = ()
    bwd_users: tuple[int, ...] = ()
    is_phantom: bool = False
    is_output: bool = False
    is_movable: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One forward operation and, if `has_backward`, its backward step.

    Each peak is counted above everything that is alive at the start of the step, and includes the
    results of the step (outputs, phantoms, new gradients).
    """

    name: str
    fwd_time_ms: float
    bwd_time_ms: float = 0.0
    has_backward: bool = True
    fwd_peak_bytes: int = 0  # of a forward that keeps its phantoms ("records")
    fwd_peak_nograd_bytes: int = 0  # of any other forward (see `liveness`)
    bwd_peak_bytes: int = 0
    grads_before_bytes: int = 0  # activation gradients alive when the backward step starts
    rerun_state_bytes: int = 0  # random state and buffer copies kept from first to last forward
    module_path: str = ""
    op: str = ""
    source: str = ""  # "file.py:12" of the user's code, for messages


_NON_NEGATIVE = (
    "fwd_time_ms",
    "bwd_time_ms",
    "fwd_peak_bytes",
    "fwd_peak_nograd_bytes",
    "bwd_peak_bytes",
    "grads_before_bytes",
    "rerun_state_bytes",
)


@dataclass(frozen=True)
class Problem:
    """Nodes in execution order and the storages between them; the input of every planner."""

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    link: Link | None = None  # to other memory, if storages may be moved there

    def __repr__(self) -> str:
        return f"<problem of {len(self.nodes)} nodes and {len(self.storages)} storages>"

    def __post_init__(self) -> None:
        count = len(self.nodes)
        for node in self.nodes:
            for name in _NON_NEGATIVE:
                if not 0 <= getattr(node, name) < math.inf:
                    raise ValueError(f"node {node.name}: {name} is {getattr(node, name)}")
        for storage in self.storages:
            if not 0 <= storage.producer < count:
                raise ValueError(f"storage {storage.name}: no node {storage.producer}")
            if storage.size_bytes < 0:
                raise ValueError(f"storage {storage.name}: size {storage.size_bytes}")
            if any(not storage.producer < user < count for user in storage.fwd_users):
                raise ValueError(f"storage {storage.name}: read before it is made")
            if any(
                not storage.producer <= user < count or not self.nodes[user].has_backward
                for user in storage.bwd_users
            ):
                raise ValueError(f"storage {storage.name}: read by a backward that does not exist")
            if storage.is_movable and (storage.is_phantom or storage.is_output):
                raise ValueError(f"storage {storage.name}: phantoms and outputs are not movable")
            if storage.is_phantom and (
                storage.fwd_users or storage.is_output or storage.bwd_users != (storage.producer,)
            ):
                raise ValueError(f"storage {storage.name}: a phantom has its producer as only user")

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """Nodes with a backward step, in the order of these steps."""
        return tuple(k for k in reversed(range(len(self.nodes))) if self.nodes[k].has_backward)

    @property
    def arriving_bytes(self) -> int:
        """Gradients of the outputs."""
        order = self.backward_order
        return self.nodes[order[0]].grads_before_bytes if order else 0

    @cached_property
    def products(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the storages that its forward makes."""
        return self._by_node(lambda storage: (storage.producer,))

    @cached_property
    def fwd_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the storages that its forward reads."""
        return self._by_node(lambda storage: storage.fwd_users)

    @cached_property
    def bwd_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the storages that its backward reads, its phantoms included."""
        return self._by_node(lambda storage: storage.bwd_users)

    @cached_property
    def base_time_ms(self) -> float:
        """Time of one step without any recomputation."""
        return sum(node.fwd_time_ms + node.bwd_time_ms for node in self.nodes)

    # Sets of storages as bit masks (bit i = storage i): liveness is then a few integer operations.

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage."""
        return tuple(storage.size_bytes for storage in self.storages)

    @cached_property
    def product_masks(self) -> tuple[int, ...]:
        """For each node, the set of storages that its forward makes."""
        return tuple(_mask(row) for row in self.products)

    @cached_property
    def fwd_input_masks(self) -> tuple[int, ...]:
        """For each node, the set of storages that its forward reads."""
        return tuple(_mask(row) for row in self.fwd_inputs)

    @cached_property
    def bwd_input_masks(self) -> tuple[int, ...]:
        """For each node, the set of storages that its backward reads."""
        return tuple(_mask(row) for row in self.bwd_inputs)

    @cached_property
    def phantom_masks(self) -> tuple[int, ...]:
        """For each node, the set of its phantoms (empty: the node has none)."""
        return tuple(
            _mask(index for index in row if self.storages[index].is_phantom)
            for row in self.products
        )

    @cached_property
    def output_mask(self) -> int:
        """The set of storages that are returned to the user."""
        return _mask(i for i, storage in enumerate(self.storages) if storage.is_output)

    @cached_property
    def forward_peaks(self) -> tuple[int, ...]:
        """Peak of each recording forward; at least the bytes of its results."""
        return tuple(
            max(node.fwd_peak_bytes, self.bytes_of(self.product_masks[k]))
            for k, node in enumerate(self.nodes)
        )

    @cached_property
    def forward_peaks_nograd(self) -> tuple[int, ...]:
        """Peak of each forward that does not record; at least the bytes of its results."""
        return tuple(
            max(
                node.fwd_peak_nograd_bytes,
                self.bytes_of(self.product_masks[k] & ~self.phantom_masks[k]),
            )
            for k, node in enumerate(self.nodes)
        )

    def reads(self, kind: str, node: int) -> tuple[int, ...]:
        """Return the storages that a step reads: a node's forward ("F") or backward ("B")."""
        return (self.fwd_inputs if kind == "F" else self.bwd_inputs)[node]

    def time_ms(self, kind: str, node: int) -> float:
        """Return the time of a step."""
        row = self.nodes[node]
        return row.fwd_time_ms if kind == "F" else row.bwd_time_ms

    def bytes_of(self, mask: int) -> int:
        """Return the bytes of a set of storages."""
        total = 0
        while mask:
            low = mask & -mask
            total += self.sizes[low.bit_length() - 1]
            mask ^= low
        return total

    @cached_property
    def fingerprint(self) -> str:
        """Digest of structure and bytes, on which the validity of a plan depends.

        Times are left out, because they differ between two measurements of one network, and so are
        the link and what may be moved: a plan without moves is valid with or without them.
        """
        times = ("fwd_time_ms", "bwd_time_ms", "source")
        rows: list[Any] = [
            [value for key, value in dataclasses.asdict(node).items() if key not in times]
            for node in self.nodes
        ]
        rows += [
            [value for key, value in dataclasses.asdict(storage).items() if key != "is_movable"]
            for storage in self.storages
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def _by_node(self, nodes_of: Callable[[Storage], Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        table: list[list[int]] = [[] for _ in self.nodes]
        for index, storage in enumerate(self.storages):
            for node in nodes_of(storage):
                table[node].append(index)
        return tuple(tuple(row) for row in table)

    def to_json(self) -> str:
        """Return the problem as JSON text; `from_json` gives an equal problem back."""
        return json.dumps(row_of(self))

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Read what `to_json` wrote.

        Raises:
            PlanFileError: the text is no problem.
        """
        return from_row(cls, parse(text), "problem")


def indices_of(mask: int) -> list[int]:
    """Return the members of a set that is a bit mask, the smallest first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _mask(indices: Iterable[int]) -> int:
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask
