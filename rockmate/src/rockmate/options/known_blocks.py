"""Known options of blocks, kept for blocks of equal structure and other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rockmate.options.options import BlockOption, measure_option, pareto
from rockmate.problems.blocks import Block
from rockmate.problems.problem import Problem
from rockmate.schedules.steps import Steps

_MOST_STRUCTURES = 200
_MOST_PINNED = 4
_MOST_WAYS = 60  # per structure


@dataclass
class KnownBlocks:
    """Steps that solvers have found for blocks, by the structure of the block."""

    steps: dict[object, dict[Steps, None]] = field(default_factory=dict)
    pinned: dict[frozenset[int], None] = field(default_factory=dict)

    def add(
        self,
        blocks: Sequence[Block],
        options: Mapping[int, tuple[BlockOption, ...]],
        pinned: frozenset[int],
    ) -> None:
        """Add the options of every block, and the storages that were pinned to get these blocks."""
        self.pinned[pinned] = None
        _keep_last(self.pinned, _MOST_PINNED)
        for block in {block.class_id: block for block in blocks}.values():
            found = self.steps.setdefault(_structure(block.local), {})
            found.update(dict.fromkeys(option.steps for option in options[block.class_id]))
            _keep_last(found, _MOST_WAYS)
        _keep_last(self.steps, _MOST_STRUCTURES)

    def options(self, block: Block) -> tuple[BlockOption, ...] | None:
        """Return the known options of a block, or None if it has never been solved."""
        known = self.steps.get(_structure(block.local))
        if known is None:
            return None
        return pareto([measure_option(block.local, steps) for steps in known])


def _keep_last(table: dict[Any, Any], count: int) -> None:
    while len(table) > count:
        del table[next(iter(table))]


def _structure(local: Problem) -> object:
    """Return a value that is equal for blocks that can run the same steps."""
    nodes = tuple((node.has_backward, bool(node.rerun_state_bytes)) for node in local.nodes)
    storages = tuple(
        (s.producer, s.fwd_users, s.bwd_users, s.is_phantom, s.is_output) for s in local.storages
    )
    return nodes, storages
