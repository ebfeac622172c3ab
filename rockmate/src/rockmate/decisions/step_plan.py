"""One option for every call of a block in a step, and the step that runs with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements import flatten
from rkgb.torch_api import at_end_of_backward, has_saved_hooks, keeps_graph, latest_sequence_nr
from rockmate.blockwise.rehearsal import Marker
from rockmate.calls.plans_of_module import NotPlannedError
from rockmate.comparison.eager import losses_among
from rockmate.decisions.blocks import AGAIN, KEEP, HowToRun, RootBlock
from rockmate.decisions.dressing import Dressing
from rockmate.decisions.recomputed import run_recomputed
from rockmate.guards.snapshot import HOOKS
from rockmate.runtime.backwards import compares_contents
from rockmate.runtime.outputs import OutputsHeld


@dataclass(eq=False)
class StepPlan:
    """Runs a root with the chosen option for each call of its blocks.

    A call that the sample's step did not have saves nothing. `name` is the root's class.
    """

    name: str
    blocks: Mapping[str, RootBlock]
    ways: Mapping[str, tuple[HowToRun, ...]]  # for the calls of each block, in order
    budget_bytes: int
    room_bytes: int | None = None  # what the sample's step left of the budget
    marker: Marker | None = None
    told: set[tuple[str, str]] = field(default_factory=set)  # paths, and what to do
    count: int = 0  # number of steps
    own: Nodes | None = None  # of the latest step, outside of blocks
    most_nodes: int | None = None  # outside of blocks, for which there is room or a warning
    dressing: Dressing = field(init=False)

    def __post_init__(self) -> None:
        self.dressing = Dressing({path: block.module for path, block in self.blocks.items()})

    @property
    def recordings(self) -> int:
        """The number of plans for the blocks, and of backwards that were recorded for them."""
        forwards = {run for runs in self.ways.values() for run in runs if not isinstance(run, str)}
        return sum(1 + len(plan.executor.variants) for run in forwards for plan in run.plans)

    def holds(self, model: nn.Module) -> bool:
        """Whether the blocks are still those that were planned."""
        return all(_at(model, block.path) is block.module for block in self.blocks.values())

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward of the root."""
        self.count += 1
        step, begin = _Step(self), latest_sequence_nr()
        with self.dressing.led_to(step):
            result = model.forward(*args, **kwargs)
        self.own = Nodes(latest_sequence_nr() - begin - step.nodes, step.most_between)
        most = self.most_nodes
        is_more = most is not None and self.own.total > most
        if is_more and not step.has_more_calls and not self._has_hooks():
            self.tell(
                "forward",
                "computes more outside of its blocks than in the sample's step "
                f"({self.own.total} operations with a gradient, and {most} were planned)",
                "Plan with a sample whose step computes most.",
            )
        if self.room_bytes is not None:
            self._watch_outputs(result, self.room_bytes)
        return result

    def _has_hooks(self) -> bool:
        """Whether blocks have hooks, which make nodes that save nothing."""
        modules = [block.module for block in self.blocks.values()]
        return any(getattr(module, table) for module in modules for table in HOOKS)

    def _watch_outputs(self, result: Any, room_bytes: int) -> None:
        """Warn once if outputs beside the losses are held through a backward, above the budget."""
        outputs = [t for t in flatten(result)[0] if isinstance(t, Tensor) and t.grad_fn is not None]
        losses = losses_among(outputs)
        others = {
            f"output {n}": t for n, t in enumerate(outputs) if losses is not outputs and t.dim()
        }
        if not others:
            return
        held = OutputsHeld(others)

        def look() -> None:
            if self.room_bytes is not None and held.warn_above(room_bytes, self.name):
                self.room_bytes = None

        def begin(_: object) -> None:
            if not keeps_graph():  # by its end the graph has let go of them
                at_end_of_backward(look)

        for node in [loss.grad_fn for loss in losses if loss.grad_fn is not None]:
            node.register_prehook(begin)

    def tell(self, path: str, what: str, instead: str) -> None:
        """Warn, once per block and advice, that a step may take more than its budget."""
        if (path, instead) in self.told:
            return
        self.told.add((path, instead))
        warnings.warn(
            f"'{path}' in {self.name} {what}, and the step may take more than the budget of "
            f"{self.budget_bytes} bytes. {instead}",
            RuntimeWarning,
            stacklevel=2,
        )


def _at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


@dataclass(frozen=True)
class Nodes:
    """Nodes of autograd that a root makes outside of its blocks; they keep what they save."""

    total: int
    most_between: int  # two blocks


class _Step:
    """One call of the root, to which calls of its blocks are redirected."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan, self.counts = plan, dict[str, int]()
        self.compares = compares_contents(plan.count)
        self.is_inside, self.place = False, 0
        self.has_more_calls = False  # than in the sample's step
        self.nodes, self.most_between = 0, 0  # nodes of autograd: in blocks, and between two
        self._end: int | None = None  # of the latest block

    def __call__(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        plan, block = self.plan, self.plan.blocks[path]
        if self.is_inside or not torch.is_grad_enabled():
            return block.view.forward(*args, **kwargs)
        count = self.counts.get(path, 0)
        self.counts[path] = count + 1
        ways = plan.ways.get(path, ())
        if count >= len(ways):
            self.has_more_calls = True
            plan.tell(
                path,
                f"is called {count + 1} times in this step, and {len(ways)} calls were planned "
                "from the sample. The others keep nothing but their arguments",
                "Plan with a sample whose step calls it most often.",
            )
        way = ways[count] if count < len(ways) else AGAIN
        self.is_inside = True
        begin = latest_sequence_nr()
        if self._end is not None:
            self.most_between = max(self.most_between, begin - self._end)
        try:
            if plan.marker is None:
                return self._run(block, way, args, kwargs)
            plan.marker(f"F{self.place} begins")
            result = self._run(block, way, args, kwargs)
            plan.marker(f"F{self.place} ends")
            self.place += 1
            return result
        finally:
            self.is_inside = False
            self._end = latest_sequence_nr()
            self.nodes += self._end - begin

    def _run(
        self, block: RootBlock, way: HowToRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if not isinstance(way, str):
            try:
                return way(args, kwargs)
            except NotPlannedError as why:
                self.plan.tell(
                    block.path,
                    f"is called otherwise than it was planned ({why}). This call keeps nothing "
                    "but its arguments",
                    "Plan with a larger budget.",
                )
                way = AGAIN
        if way is KEEP or not block.can_run_again:
            return block.view.forward(*args, **kwargs)
        if has_saved_hooks():
            self.plan.tell(
                block.path,
                "is called inside of hooks on saved tensors (a checkpoint's, or those of "
                "save_on_cpu), and would be computed again in its backward. It runs plain, and the "
                "hooks decide what it keeps",
                "Leave the hooks out, since the plan saves memory already.",
            )
        return run_recomputed(
            block.view, block.path, args, kwargs,
            writes_buffers=block.writes_buffers, compares=self.compares, reads=block.reads,
        )  # fmt: skip
