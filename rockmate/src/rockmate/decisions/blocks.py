"""The blocks of a root: submodules that it calls in a sample's step, and the options of each call.

A block is recorded at its call, and gets the options of a planned module. If a block itself has
value-dependent control flow, the submodules that it calls become blocks instead. If these could
save little of its memory, the block remains, and its calls keep everything or nothing. Calls of
blocks with tensors of many sizes (experts that get some of the tokens) also keep everything or
nothing, because later sizes differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.elements import group_of
from rkgb.errors import without_advice
from rkgb.outside import Readable
from rkgb.torch_api import placed_parameters
from rockmate.arguments import Call
from rockmate.blockwise.kinds import Kind
from rockmate.calls.plan_store import Family, Key
from rockmate.calls.planned_module import PlannedModule
from rockmate.calls.plans_of_module import NotPlannedError
from rockmate.decisions.dressing import undressed
from rockmate.errors import InfeasibleBudgetError, RockmateError
from rockmate.networks import Planned
from rockmate.options.options import BlockOption
from rockmate.settings import Terms

KEEP, AGAIN = "keep", "again"  # a plain call; a call that saves nothing and is recomputed
EVERYTHING = 1 << 62  # a budget that keeps everything
_MOST_KINDS = 16  # of calls that one block plans for; more seem to be without end


class WrittenOutsideError(Exception):
    """The root's forward writes to a tensor after a block has read it."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, name)
        self.path, self.name = path, name
        self.group = group_of(path)

    def __str__(self) -> str:
        return (
            f"'{self.path}.{self.name}' is written in the forward of the root after '{self.path}' "
            "has read it, so that it and layers in its place keep everything: a recomputation "
            "would read it as it is then. Write it before the call, or after the step"
        )


class RecordedBlock(PlannedModule):
    """Records calls of a block, and makes forwards that run them as planned."""

    is_part = True

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Key, Planned]:
        """Return the key of a call, and its recording, which keeps everything."""
        self.prepare([(args, kwargs)])
        key, family = next(reversed(self.plans.families.items()))
        return key, family.variants[0]

    def as_planned(self, key: Key, planned: Planned, most_kept_bytes: int) -> PlannedBlock:
        """Return a forward of the same block that runs calls of one key as planned."""
        settings = replace(
            self.settings, budget=planned.budget_bytes, most_kept_bytes=most_kept_bytes
        )
        forward = PlannedBlock(self.model, settings)
        forward.watch = self.watch
        row = self.plans.families[key].row
        forward.plans.put(key, Family([planned], row))
        forward._locate(planned)
        forward.first = planned
        return forward


class PlannedBlock(PlannedModule):
    """Runs one option of a block.

    A call of another kind (another number, an attribute that has changed) is planned when it comes,
    within the bytes of the option at its peak and between its passes.
    """

    is_part = True

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        super().__init__(model, settings)
        self.refused: dict[Key, str] = {}  # calls that no plan fits

    def _plan(self, key: Key, call: Call) -> Family:
        if key in self.refused:
            raise NotPlannedError(self.refused[key])
        self.is_sealed = len(self.plans.families) + len(self.refused) >= _MOST_KINDS
        try:
            with _in_a_step():
                return super()._plan(key, call)
        except NotPlannedError as error:
            if not self.is_sealed:
                self.refused[key] = str(error)
            raise

    def _add_way(self, family: Family, call: Call) -> Planned:
        with _in_a_step():
            return super()._add_way(family, call)


@contextlib.contextmanager
def _in_a_step() -> Iterator[None]:
    """Plan for a call of a block as if outside of its root.

    Raises:
        NotPlannedError: the call cannot be planned within the bytes of the block.
    """
    try:
        with undressed():
            yield
    except InfeasibleBudgetError as error:
        raise NotPlannedError(
            f"it needs {error.minimum_bytes} bytes, and may take {error.asked_bytes} in this step"
        ) from error
    except (RockmateError, RkgbError) as error:
        raise NotPlannedError(without_advice(str(error))) from error


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shapes of the tensors among the leaves of a call."""
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))


HowToRun = PlannedBlock | str  # or `KEEP`, or `AGAIN`


@dataclass(eq=False)
class RootBlock:
    """One submodule, its recordings, and its observed writes."""

    path: str
    module: nn.Module
    view: nn.Module  # the same state, never redirected
    base: RecordedBlock
    writes_buffers: bool = False
    can_run_again: bool = True  # it changes nothing but buffers and attributes
    # What its Python may read outside, by the call that was recorded.
    read_by: dict[Key, list[Readable]] = field(default_factory=dict)
    planned: dict[tuple[Key, int], PlannedBlock] = field(default_factory=dict)

    @property
    def reads(self) -> list[Readable]:
        """What its Python may read outside."""
        return [one for own in self.read_by.values() for one in own]

    @property
    def group(self) -> str:
        """Equal for repeated layers."""
        return group_of(self.path)


@dataclass(eq=False)
class SeenCall:
    """One call of a block in the sample's step, with its options."""

    block: RootBlock
    shapes: tuple[Any, ...]
    key: Key
    kind: Kind
    runs_whole: bool  # it keeps everything or nothing

    @property
    def options(self) -> tuple[BlockOption, ...]:
        """The options, the fastest first."""
        if not self.runs_whole:
            return self.kind.options
        options = self.kind.options
        most = max(options, key=lambda o: o.saved_bytes)
        least = min(options, key=lambda o: o.saved_bytes)
        time_ms = sum(node.fwd_time_ms for node in self.kind.recorded.problem.nodes)
        if not self.block.can_run_again or most.saved_bytes == least.saved_bytes:
            return (most,)
        return most, replace(
            most, saved_bytes=least.saved_bytes, overhead_ms=max(time_ms, most.overhead_ms)
        )

    def run(self, number: int) -> HowToRun:
        """Return what runs one of the options."""
        if self.runs_whole:
            return (KEEP, AGAIN)[number]
        known = self.block.planned.get((self.key, number))
        if known is None:
            planned = self.kind.planned(number)
            kept_bytes = self.options[number].saved_bytes
            known = self.block.base.as_planned(self.key, planned, kept_bytes)
            self.block.planned[self.key, number] = known
        return known

    @property
    def least(self) -> int:
        """The option that keeps least."""
        rows = self.options
        return min(range(len(rows)), key=lambda n: (rows[n].saved_bytes, rows[n].bwd_peak_bytes))

    def reads(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that it reads, with their names."""
        view, planned = self.block.view, self.kind.recorded
        own: dict[str, Tensor] = dict(placed_parameters(view, remove_duplicate=False))
        own.update(view.named_buffers(remove_duplicate=False))
        basic = planned.network.basic
        names = {**basic.parameters, **basic.buffers}
        read = {names.get(name) for name in planned.executor.expected.program.externals}
        whole = bool(planned.network.opaque)  # an opaque call may read any of them
        yield from ((name, tensor) for name, tensor in own.items() if whole or name in read)

    @property
    def savable_bytes(self) -> int:
        """The largest difference between kept bytes of two options."""
        kept = [option.saved_bytes for option in self.options]
        return max(kept) - min(kept)
