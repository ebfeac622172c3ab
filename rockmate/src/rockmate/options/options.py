"""Options of a block: the Pareto front of saved bytes, forward peak, backward peak and time.

Every option is a plan of the block's local problem. A solver finds it for a box (a limit of the
peak and a limit of saved bytes), and the exact simulator measures it. The limit of saved bytes
needs no separate constraint: the local problem's last node, the end of the forward, gets a
workspace of `peak - save`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rockmate.problems.blocks import Block
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import no_recomputation
from rockmate.schedules.moves import Moves
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step, Steps, end_of_forward
from rockmate.solvers.result import Solver


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to run a block, exact for the block alone."""

    saved_bytes: int
    fwd_peak_bytes: int  # above the block's input
    bwd_peak_bytes: int  # above the block's input; includes gradients and saved bytes
    overhead_ms: float
    steps: Steps  # of the local problem
    cut: Hashable = None  # how its parts run in pieces of rows, or None
    moves: Moves = ()  # storages that are elsewhere for some steps
    moved_bytes: int = 0  # of these storages
    host_bytes: int = 0  # that they take elsewhere, if there is a limit

    @property
    def peak_bytes(self) -> int:
        """Peak of forward and backward."""
        return max(self.fwd_peak_bytes, self.bwd_peak_bytes)


@dataclass(frozen=True, slots=True)
class Grid:
    """The number of boxes for a block."""

    peaks: int = 5
    saves: int = 8


def measure_option(local: Problem, steps: Steps, moves: Moves = ()) -> BlockOption:
    """Return the option of some steps and moves, measured by the exact simulator."""
    timeline = simulate(local, steps, moves)
    moved, link = {move.storage for move in moves}, local.link
    closing = end_of_forward(steps, len(local.nodes)) - 1
    return BlockOption(
        saved_bytes=timeline.peak_during[closing],
        fwd_peak_bytes=max(timeline.peak_during[: closing + 1]),
        bwd_peak_bytes=max(timeline.peak_during[closing + 1 :], default=0),
        overhead_ms=timeline.overhead_ms,
        steps=steps,
        moves=moves,
        moved_bytes=sum(local.sizes[index] for index in moved),
        host_bytes=0
        if link is None or link.host_bytes is None
        else sum(link.host_taken(local.sizes[index]) for index in moved),
    )


def boxed(local: Problem, peak_bytes: int, save_bytes: int) -> Problem:
    """Return the local problem in which plans within `peak_bytes` save at most `save_bytes`."""
    closing = dataclasses.replace(local.nodes[-1], fwd_peak_bytes=peak_bytes - save_bytes)
    return dataclasses.replace(local, nodes=(*local.nodes[:-1], closing))


def block_options(local: Problem, solver: Solver, grid: Grid) -> tuple[BlockOption, ...]:
    """Return the undominated options of a block, fastest first.

    Boxes are tried from large to small. A box is skipped if an option fits into it that is as fast
    as the optimum of a larger one, or if a larger one had no plan. So most boxes of the grid are
    not solved.
    """
    everything = measure_option(local, no_recomputation(local))
    found = [everything]
    backwards = local.backward_order
    if not backwards:
        return (everything,)
    nothing = measure_option(local, _keep_nothing(local))
    found.append(nothing)
    boundary = local.bytes_of(local.fwd_input_masks[-1])
    high_peak = everything.peak_bytes
    low_peak = min(_floor_bytes(local), high_peak)
    solved: list[tuple[int, int, float]] = []  # the least overhead within a box
    empty: list[tuple[int, int]] = []
    for peak in spread(low_peak, high_peak, grid.peaks):
        for save in spread(boundary, min(everything.saved_bytes, peak), grid.saves):
            if any(peak <= p and save <= s for p, s in empty):
                continue
            fitting = (o for o in found if o.peak_bytes <= peak and o.saved_bytes <= save)
            hint = min(fitting, key=lambda o: o.overhead_ms, default=None)
            least_ms = max((ms for p, s, ms in solved if peak <= p and save <= s), default=0.0)
            if hint is not None and hint.overhead_ms <= least_ms:
                continue
            result = solver(boxed(local, peak, save), peak, (hint or nothing).steps)
            if result.steps is None:
                empty.append((peak, save))
                continue
            option = measure_option(local, result.steps)
            found.append(option)
            if result.status == "optimal":
                solved.append((peak, save, option.overhead_ms))
    return pareto(found)


def spread(low: int, high: int, count: int) -> list[int]:
    """Return `count` even numbers from high to low, both included."""
    if high <= low or count < 2:
        return [max(low, high)]
    return sorted({low + (high - low) * i // (count - 1) for i in range(count)}, reverse=True)


def _keep_nothing(local: Problem) -> Steps:
    """Recompute every node that a backward needs once, right before the first backward."""
    plain, end = no_recomputation(local), len(local.nodes)
    needed = 0
    for k in local.backward_order:
        needed |= local.bwd_input_masks[k]
    again = []
    for k in reversed(range(end - 1)):
        if needed & local.product_masks[k] & ~local.output_mask:
            again.append(Step("F", k))
            needed |= local.fwd_input_masks[k]
    return (*plain[:end], *reversed(again), *plain[end:])


def _floor_bytes(local: Problem) -> int:
    """Return a lower bound on the block's peak: each step needs its inputs and its own peak."""
    floor = 0
    for k, node in enumerate(local.nodes[:-1]):
        reads = local.bytes_of(local.fwd_input_masks[k])
        floor = max(floor, reads + local.forward_peaks_nograd[k])
        if node.has_backward:
            reads = local.bytes_of(local.bwd_input_masks[k])
            floor = max(floor, reads + node.grads_before_bytes + node.bwd_peak_bytes)
    return floor


def pareto(options: Iterable[BlockOption]) -> tuple[BlockOption, ...]:
    """Return the undominated options, fastest first."""

    def key(o: BlockOption) -> tuple[float, int, int, int, int]:
        return o.overhead_ms, o.saved_bytes, o.fwd_peak_bytes, o.bwd_peak_bytes, o.host_bytes

    kept: list[BlockOption] = []
    for option in sorted(options, key=key):
        if not any(all(a <= b for a, b in zip(key(o), key(option), strict=True)) for o in kept):
            kept.append(option)
    return tuple(kept)


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

    def options(self, blocks: Mapping[int, Block]) -> dict[int, tuple[BlockOption, ...]] | None:
        """Return the known options of blocks, or None if one of them has never been solved."""
        known = {n: self.steps.get(_structure(block.local)) for n, block in blocks.items()}
        if None in known.values():
            return None
        return {
            n: pareto([measure_option(blocks[n].local, steps) for steps in found or ()])
            for n, found in known.items()
        }


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
