"""From a module and a sample to a `Chain`: what each stage costs, measured on real values.

Stages are measured one at a time, in forward order, each on the output of the one before. So the
activations of the whole module need not fit in memory together. Memory comes from the allocator
(see `memory`), time from a clock that the caller may replace (see `timing`).

Parameters, gradients, buffers, random state and train/eval flags are unchanged afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor.errors import StageError
from rotor.runtime.boundary import Layout, Tensors, is_differentiable, pack
from rotor.runtime.device import device_of, is_known
from rotor.runtime.gradients import uses_of_leaves
from rotor.runtime.joining import call_stage, join_modules
from rotor.runtime.memory import MemoryMeter, share_storage, storage_bytes
from rotor.runtime.program import RunStage
from rotor.runtime.rng import RngState, preserved_rng
from rotor.runtime.stages import CodeStage, current_buffer, flatten, replaced_buffers
from rotor.runtime.timing import (
    OpTimes,
    StageBackward,
    StageTimes,
    Timer,
    as_leaves,
    in_rounds,
    time_stage,
    untimed,
)
from rotor.runtime.twins import twin_parameters
from rotor.schedules.chain import Chain, Option, Stage


@dataclass(frozen=True)
class Measurement:
    """A module's stages with their chain, and the bytes that a step holds beside the chain.

    `held_bytes` are alive through the whole step, whatever the schedule: the output, which the
    caller keeps; random states and buffer copies for recomputation; and the partial gradients of
    parameters that several stages share. The chain does not count the output again.
    """

    stages: tuple[RunStage, ...]
    chain: Chain
    held_bytes: int
    device: torch.device
    passes_inputs_on: bool = False  # some stage's output shares memory with its input


def measure_module(
    module: nn.Module, sample: Any, *, preserve_rng: bool = True, timer: Timer | None = None
) -> Measurement:
    """Return what the stages of a sequential module cost on `sample`, with its present flags.

    The sample's gradient is counted even if the sample requires none, so the plan also holds for
    data that does. Times are measured with the sample as it is.

    Raises:
        NotSequentialError: the module has no stages.
        InPlaceInputError: a stage overwrites the sample.
        StageError: a stage fails, returns something other than tensors, overwrites what its own
            backward needs, or uses a tensor that requires gradients and is neither its input nor
            its parameter.
    """
    modules = flatten(module)
    try:
        inputs, layout = pack(sample)
    except TypeError as error:
        raise TypeError(
            f"the sample must be a tensor, or a tuple or list of tensors; got {error}. "
            f"Give what the module's forward takes."
        ) from None
    device = _device_of(module, inputs)
    with _harmless(module, device):
        codes = join_modules(modules, inputs, layout)
    probes = [
        _Probe(code, device, is_last=code is codes[-1], preserve_rng=preserve_rng) for code in codes
    ]
    if device_of(device).warms_up:
        # Libraries allocate workspaces and search for algorithms at the first run of a stage.
        with _harmless(module, device):
            _follow(probes, inputs, layout, lambda probe, flow: probe.warm_up(*flow))
    with _harmless(module, device), MemoryMeter(device) as meter:
        _follow(probes, inputs, layout, lambda probe, flow: probe.measure_memory(meter, *flow))
    for probe in probes:
        probe.read(meter)
    with _harmless(module, device):
        _follow(probes, inputs, layout, lambda probe, flow: probe.compare_kernels(*flow))
    clock = timer or device_of(device).time
    gradients = any(tensor.requires_grad for tensor in inputs)
    for probe in probes:
        probe.gives_gradients = gradients
        gradients |= any(p.requires_grad for p in probe.code.parameters())

    def time_all() -> list[StageTimes]:
        with _harmless(module, device):
            _follow(probes, inputs, layout, lambda probe, flow: probe.time(clock, *flow))
        return [probe.times for probe in probes]

    for probe, times in zip(probes, zip(*in_rounds(time_all), strict=True), strict=True):
        probe.prices = OpTimes.of(times, always_record=probe.always_record)
    return _assemble(probes, device, preserve_rng)


def _device_of(module: nn.Module, inputs: Tensors) -> torch.device:
    """Return the device whose memory is limited: the CUDA device in use, else the CPU."""
    devices = {t.device for t in (*inputs, *module.parameters(), *module.buffers())}
    others = sorted(d.type for d in devices if not is_known(d))
    if others:
        named = "'cuda' (ROCm)" if others[0] == "cuda" else f"'{others[0]}'"
        raise StageError(
            f"the module or its sample is on {named}. rotor can count memory and repeat random "
            f"numbers only on 'cpu' and on NVIDIA's 'cuda'. Move both to one of these.",
            "",
        )
    found = sorted((d for d in devices if d.type == "cuda"), key=str)
    if len(found) > 1:
        raise StageError(
            f"the module and its sample are spread over {', '.join(map(str, found))}. A memory "
            f"limit is about one device: move both to the same one.",
            "",
        )
    return found[0] if found else torch.device("cpu")


@contextmanager
def _harmless(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run with copies of all buffers; restore the buffers and the random state at exit.

    Each pass over the module gets new copies, so each sees the state of the first training step.
    """
    whole = CodeStage(("",), (module,))
    buffers = whole.buffers()
    copies = [current_buffer(*where).clone() for where in buffers]
    with preserved_rng([device]), replaced_buffers(buffers, copies):
        yield


def _follow(
    probes: list[_Probe],
    inputs: Tensors,
    layout: Layout,
    visit: Callable[[_Probe, tuple[Tensors, Layout]], tuple[Tensors, Layout]],
) -> None:
    """Visit the probes in forward order, each with the output of the one before."""
    flow = (tuple(tensor.detach() for tensor in inputs), layout)
    for probe in probes:
        flow = visit(probe, flow)


class _Probe:
    """The measurements of one stage."""

    def __init__(
        self, code: CodeStage, device: torch.device, *, is_last: bool, preserve_rng: bool
    ) -> None:
        self.code = code
        self.device = device
        self.preserve_rng = preserve_rng
        self.is_last = is_last
        self.detached_outputs: frozenset[int] = frozenset()
        self.reused_parameters: frozenset[int] = frozenset()
        self.mutated: tuple[tuple[nn.Module, str], ...] = ()
        self.draws_random = False
        self.always_record = False
        self.hands_on_input = False
        self.takes_twins = False
        self.gives_gradients = True  # to the stage before it, with the sample as it is
        self.output_bytes = self.grad_bytes = self.input_grad_bytes = 0
        self.saved = self.fwd_overhead = self.bwd_overhead = self.forward_peak = 0
        self.times: StageTimes  # of the last round
        self.prices: OpTimes

    def label(self, what: str) -> str:
        """Return a label for the meter that no other stage uses."""
        return f"{what} {self.code.name}"

    def warm_up(self, inputs: Tensors, layout: Layout) -> tuple[Tensors, Layout]:
        """Run everything once, unmeasured; return the stage's output."""
        rng = RngState.now([self.device])
        self.time(untimed, inputs, layout)
        rng.restore()
        return call_stage(self.code, inputs, layout, recording=False)

    def measure_memory(
        self, meter: MemoryMeter, inputs: Tensors, layout: Layout
    ) -> tuple[Tensors, Layout]:
        """Run forward, backward and plain forward under the meter; return the stage's output."""
        code = self.code
        rng = RngState.now([self.device])
        buffers = code.buffers()
        originals = [current_buffer(*where) for where in buffers]
        leaves = as_leaves(inputs)
        copies = [value.clone() for value in originals]
        with replaced_buffers(buffers, copies):
            outputs, _ = meter.run(
                self.label("record"), lambda: call_stage(code, leaves, layout, recording=True)
            )
            self.draws_random = not RngState.now([self.device]).same_as(rng)
            self.mutated = tuple(
                where
                for where, copy, original in zip(buffers, copies, originals, strict=True)
                if _is_written(where, copy, original)
            )
            self.reused_parameters = _reused_parameters(code, leaves, outputs)
            self.output_bytes = storage_bytes(outputs)
            self.hands_on_input = share_storage(inputs, outputs)
            self.detached_outputs = frozenset(
                i for i, t in enumerate(outputs) if not t.requires_grad
            )
            self.grad_bytes = sum(
                t.numel() * t.element_size() for t in outputs if is_differentiable(t)
            )
            backward = StageBackward(code, leaves, outputs)
            alive = list(outputs)
            del outputs
            # Before B(k) the executor has dropped x[k+1], unless it is the chain's output.
            release = (lambda: None) if self.is_last else alive.clear
            meter.run(self.label("release"), release)
            found = meter.run(self.label("backward"), backward)
            inward = (g for g in found[: sum(t.requires_grad for t in leaves)] if g is not None)
            self.input_grad_bytes = storage_bytes(inward)
            del found, backward, alive
        rng.restore()
        return meter.run(
            self.label("forward"), lambda: call_stage(code, inputs, layout, recording=False)
        )

    def read(self, meter: MemoryMeter) -> None:
        """Read the results of `measure_memory` from the meter, once it has ended."""
        record = meter.usage(self.label("record"))
        released = meter.usage(self.label("release")).kept_bytes
        backward = meter.usage(self.label("backward"))
        forward = meter.usage(self.label("forward"))
        self.saved = max(record.kept_bytes, self.output_bytes)
        self.fwd_overhead = max(record.peak_bytes - self.saved, 0)
        self.bwd_overhead = max(record.kept_bytes + released + backward.peak_bytes - self.saved, 0)
        self.forward_peak = max(forward.peak_bytes, self.output_bytes)

    def compare_kernels(self, inputs: Tensors, layout: Layout) -> tuple[Tensors, Layout]:
        """Run the stage with and without recording; return its output.

        If the bits differ, it has to record always. The run also shows whether the stage uses the
        twins that are put in the place of its parameters.
        """
        rng = RngState.now([self.device])
        outputs, next_layout = call_stage(self.code, inputs, layout, recording=False)
        rng.restore()
        leaves = as_leaves(inputs)
        with twin_parameters(self.code) as twins:
            recorded, _ = call_stage(self.code, leaves, layout, recording=True)
        self.takes_twins = uses_of_leaves(recorded).keys() <= {*leaves, *twins}
        if not all(torch.equal(a, b) for a, b in zip(outputs, recorded, strict=True)):
            # Without grad torch chooses other kernels in places (LSTM on the CPU).
            self.always_record = True
            self.forward_peak = max(self.forward_peak, self.saved + self.fwd_overhead)
        return tuple(tensor.detach() for tensor in recorded), next_layout

    def time(self, clock: Timer, inputs: Tensors, layout: Layout) -> tuple[Tensors, Layout]:
        """Time the stage once in every form."""
        rng = RngState.now([self.device])
        stage = RunStage(self.code, self.mutated, self.detached_outputs)
        with twin_parameters(self.code) if self.takes_twins else nullcontext():
            self.times = time_stage(
                clock,
                stage,
                inputs,
                layout,
                self.device,
                preserve_rng=self.preserve_rng,
                accumulates=self.takes_twins,
                gives_gradients=self.gives_gradients,
            )
        rng.restore()
        recording = self.always_record
        outputs, next_layout = call_stage(self.code, inputs, layout, recording=recording)
        return tuple(tensor.detach() for tensor in outputs), next_layout


def _is_written(where: tuple[nn.Module, str], copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Return whether a stage has written to `copy`, the copy of a buffer that it was given."""
    module = where[0]
    if isinstance(module, nn.modules.batchnorm._NormBase):
        # Its kernel writes without raising the version, and may write the values it finds there.
        return module.training and module.track_running_stats
    now = current_buffer(*where)
    return now is not copy or copy._version > 0 or not torch.equal(now, original)


def _reused_parameters(code: CodeStage, leaves: Tensors, outputs: Tensors) -> frozenset[int]:
    """Return the indices of the stage's parameters that more than one of its operations use.

    Raises:
        StageError: the graph reaches a tensor that would silently get no gradient.
    """
    own = {*leaves, *code.parameters()}
    uses = uses_of_leaves(outputs)
    for leaf in uses:
        if leaf not in own:
            raise StageError(
                f"stage {code.name} uses a tensor of shape {tuple(leaf.shape)} that requires "
                f"gradients and is neither its input nor a registered parameter: its gradient "
                f"would be lost. Register it as a parameter of a module of the stage, or detach "
                f"it.",
                code.name,
            )
    return frozenset(i for i, p in enumerate(code.parameters()) if uses[p] > 1)


def _assemble(probes: list[_Probe], device: torch.device, preserve_rng: bool) -> Measurement:
    stages = []
    for probe, following in zip(probes, [*probes[1:], None], strict=True):
        # The caller holds the chain's output. It is counted beside the chain, not in it.
        output = 0 if probe.is_last else probe.output_bytes
        outside = probe.output_bytes - output
        option = Option(
            saved_bytes=probe.saved - outside,
            fwd_time_ms=probe.prices.record,
            bwd_time_ms=probe.prices.backward,
            fwd_overhead_bytes=probe.fwd_overhead,
            bwd_overhead_bytes=probe.bwd_overhead,
            forget_time_ms=probe.prices.forget,
        )
        inward = 0 if following is None else following.input_grad_bytes
        stages.append(
            Stage(
                name=probe.code.name,
                options=(option,),
                output_bytes=output,
                output_grad_bytes=max(probe.grad_bytes, inward),
                forward_time_ms=probe.prices.forward,
                forward_peak_bytes=probe.forward_peak - outside,
            )
        )
    runs = tuple(
        RunStage(p.code, p.mutated, p.detached_outputs, p.always_record, p.reused_parameters)
        for p in probes
    )
    held = probes[-1].output_bytes + _rerun_bytes(probes, device, preserve_rng)
    held += _shared_parameter_bytes(probes)
    hands_on = any(probe.hands_on_input for probe in probes)
    return Measurement(runs, Chain(tuple(stages)), held, device, hands_on)


def _rerun_bytes(probes: list[_Probe], device: torch.device, preserve_rng: bool) -> int:
    """Return the bytes for recomputing every stage, beside tensors of the chain."""
    buffers = [current_buffer(*where) for probe in probes for where in probe.mutated]
    # One copy is kept from the first run to the last; the last run writes to another.
    held = 2 * sum(buffer.nbytes for buffer in buffers)
    if preserve_rng:
        # One for each stage that draws; besides the states before and after, and the caller's.
        states = sum(probe.draws_random for probe in probes) + 3
        held += states * device_of(device).random_state_bytes
    return held


def _shared_parameter_bytes(probes: list[_Probe]) -> int:
    """Return the bytes of partial gradients that wait for the backward of an earlier stage."""
    users: Counter[nn.Parameter] = Counter()
    reused: set[nn.Parameter] = set()
    for probe in probes:
        parameters = probe.code.parameters()
        users.update(parameters)
        reused.update(parameters[index] for index in probe.reused_parameters)
    # A stage that uses a parameter several times holds its own sum beside the waiting one.
    return sum(
        p.nbytes * (2 if p in reused else 1)
        for p, count in users.items()
        if count > 1 and p.requires_grad
    )
