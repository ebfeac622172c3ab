"""Kinds of blocks: blocks that differ only in their parameters, recorded once, with options.

The collectives of a block, also those of its recomputation, must run in one order on all processes,
as in tensor parallelism. So such blocks have one plan on all of them, which they make together. A
call of another kind runs plain. If each process planned it alone, the orders might differ.
Processes would then wait for ever, or add up unrelated tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rockmate.arguments import Call
from rockmate.blockwise.rehearsal import Mark
from rockmate.calls.planned_module import PlannedModule
from rockmate.calls.plans_of_module import NotPlannedError
from rockmate.errors import UnsupportedModuleError
from rockmate.guards.input_signature import key_of
from rockmate.guards.sharded import own_class
from rockmate.networks import Planned
from rockmate.networks.cutting import Cutting, beside, cutting_of
from rockmate.networks.executables import once_where_fixed, planned_executable
from rockmate.networks.network import Network
from rockmate.options.module_choice import ModuleCall
from rockmate.options.options import BlockOption, pareto
from rockmate.planners.module_options import module_options, options_of
from rockmate.requests.request import Request
from rockmate.requests.sources import planned_for
from rockmate.runtime.execute import Executor
from rockmate.runtime.plain import plain
from rockmate.schedules.moves import Moves
from rockmate.schedules.plan import make_plan
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps
from rockmate.settings import Terms

Way = tuple[Hashable, Steps, Moves]  # how it is cut, the steps, and what moves


@dataclass
class Kind:
    """Blocks that differ only in their parameters: recorded once, with options."""

    recorded: Planned  # keeping everything
    options: tuple[BlockOption, ...]
    networks: Mapping[Hashable, Network]  # whole (None), and as options cut it
    gathered_bytes: int  # further gradients that an engine holds
    is_spread: bool = False  # it has collectives inside
    host_part: int | None = None  # the most that each block takes elsewhere if all take as much
    least: int = field(init=False)  # the option that keeps least
    is_shared: bool = field(init=False, default=False)  # the options are the first process's
    _planned: dict[BlockOption, Planned] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        part = self.host_part
        fitting = (n for n, o in enumerate(self.options) if part is None or o.host_bytes <= part)
        self.least = min(
            fitting, key=lambda n: (self.options[n].saved_bytes, self.options[n].bwd_peak_bytes)
        )

    def planned(self, number: int) -> Planned:
        """Return what runs one of the options; each is made once."""
        option = self.options[number]
        if option not in self._planned:
            own = replace(self.recorded, network=self.networks[option.cut])
            self._planned[option] = self.of_block(own, option)
        return self._planned[option]

    def of_block(self, own: Planned, option: BlockOption) -> Planned:
        """Return what runs one of the options, for what was recorded of one of the blocks.

        It is cut as the option cuts.
        """
        problem = own.network.problem
        peak = simulate(problem, option.steps, option.moves).peak_bytes
        plan = make_plan(problem, option.steps, peak, "module options", option.moves)
        executor = Executor(planned_executable(own.network, plan))
        if option.cut is not None:
            plan = beside(plan, self.recorded.problem.base_time_ms)
        return replace(
            own, plan=plan, executor=executor, budget_bytes=peak, most_kept_bytes=option.saved_bytes
        )

    def has_option_of(self, planned: Planned, option: BlockOption) -> bool:
        """Whether an option is for what was recorded of a block, too."""
        return planned.network.problem is self.networks[option.cut].problem

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of nodes and the backward order, which steps of an option depend on."""
        problem = self.recorded.problem
        return len(problem.nodes), problem.backward_order

    @property
    def ways(self) -> list[Way]:
        """The cut, the steps and the moves of each option."""
        return [(option.cut, option.steps, option.moves) for option in self.options]

    def take(self, ways: Sequence[Way], least: int) -> None:
        """Replace the options; with `least` the first process keeps least.

        This process might choose another one: sizes differ between processes, and so do the bytes
        that sending threads held during the measurement.
        """
        self.options = options_for(self.networks, ways)
        self.least, self.is_shared = least, True


def ways_to_run(
    networks: Mapping[Hashable, Network], backend: str, host_part: int | None = None
) -> tuple[BlockOption, ...]:
    """Return the options of a recorded block; must-save nodes are not recomputed.

    Options in pieces follow those of the whole, if no other one is as good.
    """
    found: list[Way] = []
    for cut, network in networks.items():
        for option in module_options(network.problem, backend=backend, host_part=host_part):
            found.append((cut, *once_where_fixed(network, option.steps, option.moves)))
    options = options_for(networks, found)
    good = pareto(options)
    return tuple(option for option in options if option.cut is None or option in good)


def options_for(
    networks: Mapping[Hashable, Network], ways: Iterable[Way]
) -> tuple[BlockOption, ...]:
    """Return ways to run a block as options; what pieces take beside the whole is extra time.

    Raises:
        UnsupportedModuleError: the block is not cut as one of them cuts it.
    """
    found = []
    whole_ms = networks[None].problem.base_time_ms
    for cut, steps, moves in ways:
        if cut not in networks:
            raise UnsupportedModuleError(f"a block cannot be cut in pieces of rows as {cut}")
        problem = networks[cut].problem
        (option,) = options_of(problem, [(steps, moves)])
        more_ms = option.overhead_ms + problem.base_time_ms - whole_ms
        found.append(replace(option, cut=cut, overhead_ms=max(0.0, more_ms)))
    return tuple(found)


def recorded_block(
    model: nn.Module, call: Call, settings: Terms
) -> tuple[Planned, Cutting[Network] | None]:
    """Return the recording of a block, with a plan that keeps everything, and its cuts."""
    leaves, _ = key_of(*call)
    if any(hasattr(leaf, "device_mesh") for leaf in leaves):
        raise UnsupportedModuleError(
            f"a block ({type(model).__name__}) is called with distributed tensors, and only what "
            "runs on plain ones can be planned. Let modules around it give local ones."
        )
    with plain():
        request = Request.of(model, call, settings, losses=False)
        planned = planned_for(request)
        if not settings.split:
            return planned, None
        cutting = cutting_of(planned.network, request.basic, model, request.sample, settings)
        return planned, cutting


def refuse_shards_inside(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if path and own_class(type(module)) is not type(module):
            raise UnsupportedModuleError(
                f"fully_shard was called on '{path}' inside a block ({type(model).__name__}); its "
                "parameters are there only while it runs itself, which a plan of the whole block "
                "cannot wait for. Shard whole blocks, or name smaller ones."
            )


def call_of(
    path: str, kind: Kind, number: int, spots: Mapping[str, Mark], place: int
) -> ModuleCall:
    """Return a block of a measured step with its options; `place` is its number in the forward."""
    option = kind.options[number]
    end, start = spots[f"F{place} ends"], spots[f"F{place} begins"]
    back, done = spots[f"B{place} begins"], spots[f"B{place} ends"]
    bottom = back.bytes - option.saved_bytes - kind.recorded.problem.arriving_bytes
    more_forward = start.next_peak_bytes - start.bytes - option.fwd_peak_bytes
    more_backward = back.next_peak_bytes - bottom - option.bwd_peak_bytes
    if more_backward > 0:  # with another option the peak may come after all waiting gradients
        more_backward = max(more_backward, kind.gathered_bytes)
    return ModuleCall(
        name=path,
        options=kind.options,
        reference=number,
        more_bytes=tuple(o.saved_bytes - option.saved_bytes for o in kind.options),
        forward_start_bytes=start.bytes,
        after_forward_bytes=end.next_peak_bytes,
        backward_base_bytes=bottom,
        after_backward_bytes=done.next_peak_bytes,
        more_forward_bytes=max(0, more_forward),
        more_backward_bytes=max(0, more_backward),
    )


class LockstepModule(PlannedModule):
    """A block with collectives: once it is sealed, other calls run plain on all processes."""

    plans_alone = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module as it was planned together, or plain."""
        try:
            return super().__call__(args, kwargs)
        except NotPlannedError as other:
            warnings.warn(
                f"this call of a {type(self.model).__name__} spread over processes is not the one "
                f"that was planned ({other}). It runs plain, and may take more memory than the "
                "budget: its processes plan together only in apply_to_blocks.",
                RuntimeWarning,
                stacklevel=3,
            )
            return self.model.forward(*args, **kwargs)
