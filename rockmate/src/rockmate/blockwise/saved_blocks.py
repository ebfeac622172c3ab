"""Saving a plan of blocks in a file, and checking that a saved one fits the present blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from rockmate.blockwise.kinds import Kind, Way
from rockmate.blockwise.report import BlocksPlan, ChosenBlocks
from rockmate.blockwise.team import Team
from rockmate.errors import PlanFileError, PlanMismatchError
from rockmate.files.plan_file import PlanFile, SavedBlock, SavedBlocks, SavedKind, SeenLoss
from rockmate.guards.sharded import class_name, device_of_parameters
from rockmate.requests.identity import elsewhere, made_with
from rockmate.requests.saved_plan import cut_of, saved_cut


def with_file(
    plan: BlocksPlan, chosen: ChosenBlocks, model: nn.Module, loss: SeenLoss | None = None
) -> BlocksPlan:
    """Return a plan with the file of its choice."""
    kinds = chosen.kinds
    own = list({id(kind): kind for kind in kinds.values()}.values())
    places = {id(kind): place for place, kind in enumerate(own)}
    link = own[0].recorded.problem.link
    link = link and replace(link, host_bytes=None)  # a limit is this call's own
    pairs = zip(plan.rows, chosen.choice.options, strict=True)
    saved = SavedBlocks(
        kinds=tuple(
            SavedKind(
                *(len(k.recorded.problem.nodes), k.shape[1], tuple(o.steps for o in k.options)),
                cuts=tuple(saved_cut(o.cut) for o in k.options) if len(k.networks) > 1 else None,
                moves=tuple(o.moves for o in k.options) if link else None,
            )
            for k in own
        ),
        blocks=tuple(
            SavedBlock(
                row.path, places[id(kinds[row.path])], number, row.overhead_ms, row.base_time_ms
            )
            for row, number in pairs
        ),
        budget_bytes=plan.budget_bytes,
        in_flight=plan.in_flight,
        free_overhead_ms=plan.free_overhead_ms,
        link=link,
    )
    made = made_with(device_of_parameters(model))
    return replace(plan, file=PlanFile(class_name(model), made, (), saved, loss))


def as_saved(plan: BlocksPlan, file: PlanFile, saved: SavedBlocks) -> BlocksPlan:
    """Return a plan with the times in its file."""
    rows = (
        replace(row, overhead_ms=block.overhead_ms, base_time_ms=block.base_time_ms)
        for row, block in zip(plan.rows, saved.blocks, strict=True)
    )
    return replace(
        plan,
        rows=tuple(rows),
        file=file,
        free_overhead_ms=saved.free_overhead_ms,
        why_no_free_plan="a saved plan serves",
    )


def shared_file(
    look: Callable[[], PlanFile | None], team: Team, model: str, device: torch.device
) -> PlanFile | None:
    """Return the first process's file on all processes, or None if it has none.

    Raises:
        PlanFileError: it cannot be read, or is no such file (on all processes).
        PlanMismatchError: it was made with another model, device or version (on all processes).
    """
    found: PlanFile | str | None = None
    if team.is_first:
        try:
            found = look()
        except PlanFileError as error:
            found = str(error)
    file = team.gather(found)[0]
    if isinstance(file, str):
        raise PlanFileError(file)
    if file is not None:
        told = elsewhere(file, model, device)
        team.raise_together(mismatch(told) if told else None)
    return file


def ways_for(saved: SavedBlocks, number: int, shape: tuple[int, Sequence[int]]) -> list[Way]:
    """Return the options of a kind of blocks, by its number.

    Raises:
        PlanMismatchError: the blocks here are others.
    """
    if number >= len(saved.kinds):
        raise mismatch([f"{len(saved.kinds)} kinds of blocks in the file, more of them here"])
    kind = saved.kinds[number]
    if (kind.nodes, kind.backward_order) != (shape[0], tuple(shape[1])):
        raise mismatch(
            [f"blocks of {kind.nodes} operations in the file, of {shape[0]} in their place here"]
        )
    cuts = map(cut_of, kind.cuts) if kind.cuts is not None else [None] * len(kind.options)
    moves = kind.moves or [()] * len(kind.options)
    return list(zip(cuts, kind.options, moves, strict=True))


def numbers_for(saved: SavedBlocks, kinds: Mapping[str, Kind], in_flight: int) -> dict[str, int]:
    """Return the option of every block, by its path.

    Raises:
        PlanMismatchError: the blocks here are others.
    """
    own = list({id(kind): None for kind in kinds.values()})
    here = [(path, own.index(id(kind))) for path, kind in kinds.items()]
    then = [(block.path, block.kind) for block in saved.blocks]
    if here != then:
        told = [f"blocks {_told(then)} in the file, {_told(here)} here"]
        raise mismatch(told)
    if in_flight != saved.in_flight:
        raise mismatch([f"{saved.in_flight} forwards in flight in the file, {in_flight} here"])
    return {block.path: block.option for block in saved.blocks}


def over_budget(measured_bytes: int, budget_bytes: int) -> PlanMismatchError:
    """Return the error for a plan from a file whose step exceeds the budget."""
    return mismatch([f"a step takes {measured_bytes} bytes here, and the budget is {budget_bytes}"])


def moves_any(saved: SavedBlocks) -> bool:
    """Return whether an option of these blocks moves storages."""
    return any(any(kind.moves or ()) for kind in saved.kinds)


def mismatch(found: Sequence[str]) -> PlanMismatchError:
    """Return the error for a plan from a file that does not fit the blocks here."""
    return PlanMismatchError.of_saved("these blocks", found)


def _told(blocks: Sequence[tuple[str, int]]) -> str:
    return f"{blocks[0][0]!r} .. {blocks[-1][0]!r} ({len(blocks)})"
