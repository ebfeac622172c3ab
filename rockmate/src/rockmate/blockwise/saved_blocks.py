"""Saving a plan of blocks in a file, and checking that a saved one fits the present blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from rkgb.torch_api import placed_parameters
from rockmate.arguments import Call
from rockmate.blockwise.kinds import Kind, Way
from rockmate.blockwise.report import BlocksPlan
from rockmate.blockwise.team import Team
from rockmate.errors import PlanFileError, PlanMismatchError
from rockmate.files.plan_file import PlanFile, SavedBlock, SavedBlocks, SavedKind, SeenLoss
from rockmate.guards.input_signature import ambient, in_order, key_of
from rockmate.requests.identity import cache_key, elsewhere, made_with
from rockmate.requests.saved_plan import cut_of, saved_cut
from rockmate.settings import Terms


def file_of_blocks(
    plan: BlocksPlan,
    kinds: Mapping[str, Kind],
    options: Sequence[int],
    model: str,
    device: torch.device,
    loss: SeenLoss | None = None,
) -> PlanFile:
    """Return the file of a plan; `options` are those of its rows."""
    own = list({id(kind): kind for kind in kinds.values()}.values())
    places = {id(kind): place for place, kind in enumerate(own)}
    pairs = zip(plan.rows, options, strict=True)
    saved = SavedBlocks(
        kinds=tuple(
            SavedKind(
                *(len(k.recorded.problem.nodes), k.shape[1], tuple(o.steps for o in k.options)),
                cuts=tuple(saved_cut(o.cut) for o in k.options) if len(k.networks) > 1 else None,
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
    )
    return PlanFile(model, made_with(device), (), saved, loss)


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
        team.raise_together(_mismatch(told) if told else None)
    return file


def blocks_key(
    model: nn.Module, calls: Sequence[Call], about: object, device: torch.device, terms: Terms
) -> str:
    """Return the key of a plan of blocks in the cache; `about` has the other settings."""
    tensors = [(n, t.shape, t.dtype, t.requires_grad) for n, t in placed_parameters(model)]
    inputs = [key_of(args, in_order(kwargs))[1] for args, kwargs in calls]
    return cache_key(repr((tensors, inputs, ambient(), about)), model, device, terms)


def ways_for(saved: SavedBlocks, number: int, shape: tuple[int, Sequence[int]]) -> list[Way]:
    """Return the options of a kind of blocks, by its number.

    Raises:
        PlanMismatchError: the blocks here are others.
    """
    if number >= len(saved.kinds):
        raise _mismatch([f"{len(saved.kinds)} kinds of blocks in the file, more of them here"])
    kind = saved.kinds[number]
    if (kind.nodes, kind.backward_order) != (shape[0], tuple(shape[1])):
        raise _mismatch(
            [f"blocks of {kind.nodes} operations in the file, of {shape[0]} in their place here"]
        )
    cuts = map(cut_of, kind.cuts) if kind.cuts is not None else [None] * len(kind.options)
    return list(zip(cuts, kind.options, strict=True))


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
        raise _mismatch(told)
    if in_flight != saved.in_flight:
        raise _mismatch([f"{saved.in_flight} forwards in flight in the file, {in_flight} here"])
    return {block.path: block.option for block in saved.blocks}


def over_budget(measured_bytes: int, budget_bytes: int) -> PlanMismatchError:
    """Return the error for a plan from a file whose step exceeds the budget."""
    return _mismatch(
        [f"a step takes {measured_bytes} bytes here, and the budget is {budget_bytes}"]
    )


def _mismatch(found: Sequence[str]) -> PlanMismatchError:
    return PlanMismatchError.of_saved("these blocks", found)


def _told(blocks: Sequence[tuple[str, int]]) -> str:
    return f"{blocks[0][0]!r} .. {blocks[-1][0]!r} ({len(blocks)})"
