"""Block-wise planning: blocks become stages of a chain, and rotor's schedule becomes steps.

The chain only approximates the problem: sizes are rounded to slots, and a block is assumed to hold
all its saved tensors to its end. So schedules above the budget are also tried (*inflate*), and the
exact peak of their steps decides. Recomputations that are not needed are then dropped (*prune*).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rockmate.options.options import BlockOption, Grid, block_options
from rockmate.parallel import map_in_parallel
from rockmate.problems.blocks import Block, find_cuts, make_blocks, merge_repeated, reserved_bytes
from rockmate.problems.problem import Problem
from rockmate.progress import timed
from rockmate.schedules.prune import prune
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Step, Steps
from rockmate.solvers.result import Solver

SMALL_BLOCK_NODES = 14  # up to here blocks are solved to the optimum at once
LARGE_BLOCK_NODES = 24  # from here on a box is so slow that a small graph is better solved whole
_SLOTS = 500
_HEADROOM = 1.5  # `reserved_bytes` is conservative, so schedules well above the budget may fit
_STRIDE = 4  # on the way up, every fourth candidate is tried
_MISSES = 2  # after this many misses in a row, no larger candidate is tried


@dataclass(frozen=True)
class ChainModel:
    """A problem as a chain of blocks with options; serves any number of budgets."""

    problem: Problem
    blocks: tuple[Block, ...]
    options: dict[int, tuple[BlockOption, ...]]  # by class
    reserved_bytes: int
    name: str
    _stages: dict[tuple[int, int | None], Steps] = field(default_factory=dict, init=False)

    @cached_property
    def chain(self) -> Any:
        """The blocks as a `rotor.Chain`."""
        import rotor

        stages = []
        forward_peaks: dict[int, int] = {}
        for index, block in enumerate(self.blocks):
            if block.class_id not in forward_peaks:
                forward_peaks[block.class_id] = _forward_peak(block.local)
            nodes = block.local.nodes
            fwd_time_ms = sum(node.fwd_time_ms for node in nodes)
            bwd_time_ms = sum(node.bwd_time_ms for node in nodes)
            grad = block.local.arriving_bytes
            options = tuple(
                rotor.Option(
                    saved_bytes=option.saved_bytes,
                    fwd_time_ms=fwd_time_ms,
                    bwd_time_ms=bwd_time_ms + option.overhead_ms,
                    fwd_overhead_bytes=option.fwd_peak_bytes - option.saved_bytes,
                    bwd_overhead_bytes=max(0, option.bwd_peak_bytes - option.saved_bytes - grad),
                    key=number,
                )
                for number, option in enumerate(self.options[block.class_id])
            )
            stages.append(
                rotor.Stage(
                    name=f"block {index}",
                    options=options,
                    output_bytes=block.boundary_bytes,
                    output_grad_bytes=grad + block.waiting_bytes,
                    forward_time_ms=fwd_time_ms,
                    forward_peak_bytes=forward_peaks[block.class_id],
                )
            )
        return rotor.Chain(tuple(stages))

    def candidates(self, budget_bytes: int, *, count: int = 4) -> list[Steps]:
        """Return the steps of the fastest `count` schedules whose exact peak is within the budget.

        Faster schedules hardly ever have lower peaks. So every `_STRIDE`-th is tried on the way up,
        and every one on the way down.
        """
        inner, _, table = self._table(budget_bytes, _SLOTS)
        faster = iter(table.candidates(inner))
        seen: list[Any] = []
        found: dict[int, Steps | None] = {}
        misses = 0
        while misses < _MISSES:
            with timed("chain"):
                more = list(itertools.islice(faster, _STRIDE))
            if not more:
                break
            seen += more
            found[len(seen) - 1] = fitting = self._fitting(seen[-1], budget_bytes)
            misses = 0 if fitting else misses + 1
        fits: list[Steps] = []
        for place in reversed(range(len(seen))):
            if place not in found:
                found[place] = self._fitting(seen[place], budget_bytes)
            if steps := found[place]:
                fits.append(steps)
                if len(fits) == count:
                    break
        return fits[::-1]

    def _table(self, budget_bytes: int, slots: int) -> tuple[int, float, Any]:
        """Return the budget without what is reserved, how far rotor's table reaches, and it."""
        import rotor

        inner = max(1, budget_bytes - self.reserved_bytes)
        # The table reaches beyond the budget even if many bytes are reserved.
        headroom = min(4.0, max(_HEADROOM, 1.1 * budget_bytes / inner))
        with timed("chain"):
            table = rotor.solve_table(self.chain, inner, slots=slots, headroom=headroom)
        return inner, headroom, table

    def _fitting(self, schedule: Any, budget_bytes: int) -> Steps | None:
        """Return the steps of a schedule if their exact peak is within the budget."""
        with timed("simulation"):
            steps = self.steps_of(schedule)
            fits = simulate(self.problem, steps).peak_bytes <= budget_bytes
        return steps if fits else None

    def plan(self, budget_bytes: int, *, pruned: int = 4) -> Steps | None:
        """Return the fastest steps found within the budget, or None.

        Several candidates are pruned, because pruning may change their order.
        """
        found = self.candidates(budget_bytes, count=pruned)
        found = [prune(self.problem, steps, budget_bytes) for steps in found]
        return min(found, key=lambda steps: simulate(self.problem, steps).overhead_ms, default=None)

    def quick_plan(self, budget_bytes: int, *, slots: int, looks: int) -> Steps | None:
        """Return steps within the budget after trying `looks` of rotor's schedules above it.

        More slots hardly ever mean a lower peak, so the tries bisect the range.
        """
        inner, headroom, table = self._table(budget_bytes, slots)
        best: Steps | None = None
        low, high = 0, int(inner * headroom)
        at = inner
        for _ in range(looks):
            schedule = table.at(at)
            steps = None if schedule is None else self._fitting(schedule, budget_bytes)
            if steps is not None:
                best, low = steps, at
            elif schedule is None:
                low = at
            else:
                high = at
            at = (low + high) // 2
        return best

    def steps_of(self, schedule: Any) -> Steps:
        """Return the steps of the whole problem for a schedule of the chain."""
        import rotor

        steps: list[Step] = []
        for op in schedule.ops:
            option = op.option if isinstance(op, rotor.Backward) else None
            steps += self._steps_of_stage(op.stage, option)
        return _without_tail(tuple(steps))

    def _steps_of_stage(self, stage: int, option: int | None) -> Steps:
        """Return the steps of one block's backward with an option, or of its forward."""
        found = self._stages.get((stage, option))
        if found is None:
            block = self.blocks[stage]
            local: Sequence[Step] = [Step("F", k) for k in range(block.end - block.first)]
            if option is not None:
                steps = self.options[block.class_id][option].steps
                local = steps[len(block.local.nodes) :]
            found = tuple(Step(kind, node + block.first) for kind, node in local)
            self._stages[stage, option] = found
        return found


def chain_model(
    problem: Problem,
    solver: Solver,
    *,
    merged: bool,
    pinned: frozenset[int] = frozenset(),
    grid: Grid | None = None,
    max_nodes: int = SMALL_BLOCK_NODES,
    cache: dict[object, tuple[BlockOption, ...]] | None = None,
) -> ChainModel | None:
    """Return the chain of a problem, or None if it has no cut; a solver finds the options.

    `merged=False` cuts wherever possible. `merged=True` merges neighbouring blocks that repeat, up
    to `max_nodes` nodes. Neither is always better. `cache` shares options between models.
    """
    found = {} if cache is None else cache

    def options_of(block: Block) -> tuple[BlockOption, ...]:
        return block_options(block.local, solver, grid or _grid(len(block.local.nodes)))

    def solved(classes: Mapping[int, Block]) -> dict[int, tuple[BlockOption, ...]]:
        keys = {
            class_id: (block.signature, tuple(n.fwd_time_ms for n in block.local.nodes), grid)
            for class_id, block in classes.items()
        }
        new = {key: classes[class_id] for class_id, key in keys.items() if key not in found}
        with timed("options"):
            found.update(zip(new, map_in_parallel(options_of, new.values()), strict=True))
        return {class_id: found[key] for class_id, key in keys.items()}

    return chain_of(problem, solved, merged=merged, pinned=pinned, max_nodes=max_nodes)


def chain_of(
    problem: Problem,
    options_of: Callable[[Mapping[int, Block]], dict[int, tuple[BlockOption, ...]] | None],
    *,
    merged: bool,
    pinned: frozenset[int],
    max_nodes: int = SMALL_BLOCK_NODES,
) -> ChainModel | None:
    """Return the chain of a problem whose blocks have these options, by class.

    None if it has no cut, or there are no options.
    """
    blocks = make_blocks(problem, find_cuts(problem, pinned), pinned)
    if merged:
        blocks = make_blocks(problem, merge_repeated(blocks, max_nodes), pinned)
    if len(blocks) < 2:
        return None
    options = options_of({block.class_id: block for block in reversed(blocks)})
    if options is None:
        return None
    name = "blocks" if merged else "half blocks"
    return ChainModel(problem, blocks, options, reserved_bytes(problem, pinned), name)


def _grid(nodes: int) -> Grid:
    # Large blocks cost seconds per box, so they get few boxes.
    return Grid(5, 8) if nodes <= 16 else Grid(4, 5) if nodes <= 24 else Grid(2, 3)


def _forward_peak(local: Problem) -> int:
    """Return the peak of the block's forward if only its result is kept."""
    nodes = tuple(
        dataclasses.replace(
            node,
            has_backward=False,
            fwd_peak_bytes=(
                local.forward_peaks_nograd[k] if local.phantom_masks[k] else local.forward_peaks[k]
            ),
        )
        for k, node in enumerate(local.nodes)
    )
    storages = tuple(
        dataclasses.replace(storage, bwd_users=())
        for storage in local.storages
        if not storage.is_phantom
    )
    forward_only = Problem(nodes, storages)
    return simulate(forward_only, tuple(Step("F", k) for k in range(len(nodes)))).peak_bytes


def _without_tail(steps: Steps) -> Steps:
    """Drop recomputations after the last backward, due to blocks without a backward."""
    end = len(steps)
    has_backward = any(step.kind == "B" for step in steps)
    while has_backward and end and steps[end - 1].kind == "F":
        end -= 1
    return steps[:end]
