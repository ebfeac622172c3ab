"""One step of plain PyTorch, and the planned step that must agree with it in bits and bytes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rkgb.capture import twin_of
from rkgb.elements import Effect, InputMutation, ObserverHook, flatten, own_copy
from rkgb.engine import Sample, device_of, external_values
from rkgb.graphs import BasicGraph
from rkgb.safeguards import drawn_elsewhere, other_threads
from rockmate.comparison.agreement import agree, refuse
from rockmate.comparison.deterministic import searches_algorithms
from rockmate.comparison.eager import Keep, StepResult, differences, run_step
from rockmate.comparison.rounding import coarsest_type, compare_rounded, nudge
from rockmate.errors import SelfTestError
from rockmate.networks.executables import unplanned_executable
from rockmate.networks.network import Network, unsteady
from rockmate.networks.planned import Planned
from rockmate.runtime.execute import Executor
from rockmate.schedules.baselines import keeping_all_bytes
from rockmate.schedules.simulate import simulate

# Returns whether a condition holds in any of the processes that run the same steps.
Anyone = Callable[[bool], bool]

_log = logging.getLogger("rockmate")
_USABLE_SHARE = 0.9  # of free memory; the rest is lost to fragmentation


def eager_step(
    model: nn.Module,
    sample: Sample,
    network: Network | None,
    keep: Keep,
    anyone: Anyone = bool,
    *,
    written: Collection[str] = (),
    losses: bool = True,
) -> StepResult | None:
    """Run one eager step of a copy; None if the device has too little memory for it.

    Without a network, `written` are the parameters to which the forward writes. With `losses`, only
    scalars among the outputs get gradients.
    """
    free = device_of(sample.device).free_bytes()
    needed = 0 if network is None else keeping_all_bytes(network.problem)
    # Checked beforehand: running out of memory on a GPU disturbs other processes, and is not always
    # recognised.
    if not anyone(free is not None and needed > _USABLE_SHARE * free):
        try:
            if network is not None:
                return _plain_step(model, sample, network.basic, keep)
            with _twin(model, sample, written) as twin:
                return run_step(twin, twin, sample, keep=keep, losses=losses)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
    _log.warning(
        "an eager step of %s does not fit on %s, so the planned step is tested for its memory but "
        "not compared with an eager one",
        type(model).__name__,
        sample.device,
    )
    return None


def _plain_step(
    model: nn.Module,
    sample: Sample,
    basic: BasicGraph,
    keep: Keep,
    change: Callable[[nn.Module], nn.Module] = lambda twin: twin,
) -> StepResult:
    """Run the plain step of a recorded one, on a copy."""
    own = _own_copies(sample, basic.effects)
    with _twin(model, sample, basic.written_parameters) as copied:
        twin = change(without_looks(copied, basic.effects))
        return run_step(twin, twin, own, keep=keep, losses=basic.kind.is_of_losses)


def _own_copies(sample: Sample, effects: Sequence[Effect]) -> Sample:
    """Return the sample with copies of the arguments that a step mutates."""
    written = {effect.place for effect in effects if isinstance(effect, InputMutation)}
    copies = {id(sample.leaves[place]): own_copy(sample.leaves[place]) for place in written}
    leaves = (copies.get(id(leaf), leaf) for leaf in sample.leaves)
    return sample.with_leaves(tuple(leaves)) if written else sample


@contextlib.contextmanager
def _twin(model: nn.Module, sample: Sample, written: Collection[str]) -> Iterator[nn.Module]:
    with twin_of(model, written).known_outside() as twin:
        sample.set_attributes(twin)
        yield twin


def without_looks(twin: nn.Module, effects: Sequence[Effect]) -> nn.Module:
    """Remove observer hooks from a copy: they are for steps of the model."""
    for effect in effects:
        if isinstance(effect, ObserverHook):
            getattr(twin.get_submodule(effect.path), effect.table).pop(effect.key)
    return twin


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU's allocator raises a plain RuntimeError. Python raises a MemoryError, and so does the
    # profiler, which then has no memory for its events.
    texts = ("allocate memory", "out of memory", "ALLOC_FAILED")
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(text in str(error) for text in texts)


def peak_of(eager: StepResult | None, network: Network) -> int:
    """Return the peak that a fraction as budget refers to: measured if eager fits, else simulated.

    It counts whole blocks of the allocator, like the budget and `measured_peak_bytes`. A submodule
    that runs whole hands over its weights' gradients all at once, and keeps the state of the
    generators: nothing that is recomputed saves these, so that they count.
    """
    if eager is not None and not network.opaque:
        return eager.allocated_peak_bytes
    simulated = keeping_all_bytes(network.problem)
    return simulated if eager is None else max(simulated, eager.allocated_peak_bytes)


def self_test(
    planned: Planned,
    model: nn.Module,
    sample: Sample,
    eager: StepResult | None,
    anyone: Anyone = bool,
) -> tuple[StepResult, str]:
    """Run one planned step and compare it with the eager one, if any.

    Raises:
        SelfTestError: they differ, or another thread draws random numbers at the same time.
    """
    try:
        return _tested(planned, model, sample, eager, anyone)
    except SelfTestError as error:
        whose = " and ".join(drawn_elsewhere(sample.device))
        if not whose:
            raise
        raise SelfTestError(
            f"{type(model).__name__} cannot be planned now: another thread ({other_threads()}) "
            f"draws random numbers of {whose}, or seeds them, so that no two steps of it are "
            "alike. Plan before that thread starts, or let it have a generator of its own."
        ) from error


def _tested(
    planned: Planned, model: nn.Module, sample: Sample, eager: StepResult | None, anyone: Anyone
) -> tuple[StepResult, str]:
    if planned.network.is_rounded:
        return _test_of_pieces(planned, model, sample, eager)
    name = type(model).__name__
    run_ours = partial(_planned_step, planned, model, sample)
    run_eager = partial(_plain_step, model, sample, planned.network.basic)
    if searches_algorithms():  # the search for algorithms takes memory, at a first run only
        run_ours("nothing")
    ours = run_ours("nothing" if eager is None else "fingerprints")
    if eager is None:
        return ours, "the eager step does not fit, so that nothing was compared"
    wrong = differences(eager, ours)
    if not anyone(bool(wrong)):
        return ours, ""
    if not eager.stream.equals(ours.stream):
        refuse(wrong, name)
    network = planned.network
    coarsest = coarsest_type(network.graph.infos.values())
    found = agree(eager, ours, run_eager, run_ours, name, unsteady(network), coarsest)
    _log.warning("%s: %s", name, found)
    return ours, found


def _planned_step(planned: Planned, model: nn.Module, sample: Sample, keep: Keep) -> StepResult:
    with _twin(model, sample, planned.written) as twin:

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = tuple(flatten((args, {**kwargs, **sample.attributes}))[0])
            basic = planned.network.basic
            return planned.run(twin, external_values(basic, twin, leaves), leaves, looks=False)

        own = _own_copies(sample, planned.effects)
        return run_step(call, twin, own, keep=keep, losses=planned.is_for_losses)


def _test_of_pieces(
    planned: Planned, model: nn.Module, sample: Sample, eager: StepResult | None
) -> tuple[StepResult, str]:
    """Compare a planned step with its pieces without budget (bits), and with eager (values)."""
    name, network = type(model).__name__, planned.network
    ours = _planned_step(planned, model, sample, "nothing" if eager is None else "fingerprints")
    if eager is None:
        return ours, "the eager step does not fit, so that nothing was compared"
    if planned.executor.planned.program.runs_again or network.rebuilding is not None:
        network = network.rebuilding or network
        free = replace(planned, network=network, executor=Executor(unplanned_executable(network)))
        again = _planned_step(free, model, sample, "fingerprints")
        refuse(
            differences(again, ours), name, "These are the bits of its pieces without recomputation"
        )

    run_eager = partial(_plain_step, model, sample, planned.network.basic, "values")
    if planned.network.cut is not None:  # this eager step was run without keeping values
        eager = run_eager()
    found = compare_rounded(
        eager,
        _planned_step(planned, model, sample, "values"),
        name,
        coarsest_type(network.graph.infos.values()),
        lambda: run_eager(nudge),
    )
    _log.info("%s: %s", name, found)
    return ours, found


def refuse_wrong_prediction(planned: Planned, model: nn.Module, ours: StepResult) -> None:
    """Refuse a step over its budget on a CPU, which has no blocks: predicted sizes must hold."""
    device = device_of(planned.signature.device)
    if device.block_bytes(1) == 1:
        raise over_budget(planned, model)
    predicted = simulate(planned.network.asked, planned.plan.steps, planned.plan.moves).peak_bytes
    if ours.peak_bytes > predicted:
        _log.warning(
            "%s asked for %d bytes at its peak, and %d were predicted",
            type(model).__name__,
            ours.peak_bytes,
            predicted,
        )


def over_budget(planned: Planned, model: nn.Module) -> SelfTestError:
    """Return the error for a step that exceeded its budget."""
    return SelfTestError(
        f"the planned {type(model).__name__} peaked at {planned.measured_peak_bytes} bytes with a "
        f"budget of {planned.budget_bytes} and a prediction of {planned.plan.peak_bytes}. Please "
        "report it; a smaller budget works around it."
    )
