"""`Checkpointable`: an `nn.Sequential` that trains within a memory limit."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rotor.errors import NotMeasuredError
from rotor.limit import MemoryLimit, parse_limit
from rotor.planning import Choice, free_limit_bytes, in_bytes, schedule_within
from rotor.runtime.boundary import Tensors, pack
from rotor.runtime.execute import run_program
from rotor.runtime.measure import Measurement, measure_module
from rotor.runtime.program import Program
from rotor.runtime.stages import flatten, modules_inside, parameters_of
from rotor.runtime.timing import Timer
from rotor.schedules.chain import Chain
from rotor.schedules.report import plan_text, save_timeline
from rotor.schedules.simulate import MemoryTimeline, Schedule
from rotor.solver.table import DEFAULT_SLOTS
from rotor.strategies import STRATEGIES

log = logging.getLogger(__name__)
Value = TypeVar("Value")


@dataclass(slots=True)
class _Plan:
    """The measurement for one kind of input, and its schedule for the present limit."""

    measurement: Measurement
    schedule: Schedule | None = None
    limit_bytes: int | None = None
    program: Program | None = None


class Checkpointable(nn.Module):
    """Run a sequential module so that a training step stays within a limit of activation memory.

    Children, parameter names and state-dict keys are those of the given module, which is shared
    and not changed. In `eval()` mode and under `no_grad` it is the plain module.

        chk = Checkpointable(model, sample, "2GiB")
        chk(batch).sum().backward()

    `budget` is an int (bytes), text (`"2GiB"`, `"800 MB"`, `"40%"`), or a float in (0, 1]. A float
    is a fraction of what a step takes without recomputation. The first planned input turns it into
    bytes; these are the attribute `mem_limit` and hold for later inputs too. The budget excludes
    what is resident: parameters, buffers, the input, and parameter gradients. The default is what
    is free on the CUDA device at the first training step. `module`, `input` and `mem_limit` are
    the published names of `model`, `sample` and `budget`. `force_python` is one, too, without an
    effect: the compiled solver finds the same schedules.

    A plan is made for the sample of `measure`, or for the first input. An input that differs in
    shape, type, device, train/eval flags, frozen parameters or autocast gets a plan of its own.
    The last `max_plans` are kept. With `new_inputs="error"` such inputs are refused instead.

    Raises:
        NotSequentialError: the module is no `nn.Sequential`.
        MemoryLimitFormatError: the limit cannot be read.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        sample: Any = None,
        budget: MemoryLimit | None = None,
        mem_slots: int = DEFAULT_SLOTS,
        *,
        force_python: bool = False,
        preserve_rng_state: bool = True,
        new_inputs: Literal["plan", "error"] = "plan",
        max_plans: int = 16,
        timer: Timer | None = None,
        module: nn.Module | None = None,
        input: Any = None,
        mem_limit: MemoryLimit | None = None,
    ) -> None:
        super().__init__()
        model = _either("model", model, "module", module)
        sample = _either("sample", sample, "input", input)
        budget = _either("budget", budget, "mem_limit", mem_limit)
        if model is None:
            raise TypeError("Checkpointable needs a model: Checkpointable(model, sample, budget)")
        flatten(model)
        if new_inputs not in ("plan", "error"):
            raise ValueError(f"new_inputs is {new_inputs!r}. Give 'plan' or 'error'.")
        # Both share the same dictionaries: names and state dict agree, and replacing a child of
        # one replaces it in the other.
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self._sequential: nn.Sequential
        self._planned_modules: list[nn.Module]
        self.__dict__["_sequential"] = model  # not registered a second time
        self.training = model.training
        self.mem_limit = None if budget is None else parse_limit(budget)
        self._choice = Choice(mem_slots)
        self.preserve_rng_state = preserve_rng_state
        self.new_inputs = new_inputs
        self.max_plans = max_plans
        self._timer = timer
        self._plans: dict[Hashable, _Plan] = {}
        self._current: Hashable = None
        self.__dict__["_planned_modules"] = modules_inside(model)
        if sample is not None:
            self.measure(sample)
            if self.mem_limit is not None:
                self.compute_sequence()

    # -- planning ---------------------------------------------------------------------------

    def measure(self, input: Any) -> None:
        """Measure every stage on a sample, in training mode; the module is left as it was."""
        with self._in_training_mode():
            self._measure(input)

    def compute_sequence(
        self,
        mem_limit: MemoryLimit | None = None,
        mem_slots: int | None = None,
        force_python: bool | None = None,
        *,
        strategy: str = "optimal",
        **arguments: Any,
    ) -> Schedule:
        """Return the fastest schedule of the measured sample whose predicted peak is in the limit.

        `mem_limit` has the forms of the constructor's `budget`; a fraction refers to the measured
        sample. `strategy` may name another one of `rotor.strategies` for comparison, and
        `arguments` are passed to it. Plans for other inputs are made anew, for the new limit.

        Raises:
            NotMeasuredError: nothing has been measured.
            MemoryLimitFormatError: the limit cannot be read.
            MemoryLimitError: no limit is given and there is no CUDA device to ask.
            InfeasibleBudgetError: no schedule fits; the error carries the smallest limit.
        """
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ValueError(f"strategy {strategy!r} is unknown. Use one of {known}.")
        plan = self._measured_plan()
        given = self.mem_limit if mem_limit is None else parse_limit(mem_limit)
        limit = in_bytes(given, plan.measurement)
        before = self._choice
        slots = before.slots if mem_slots is None else mem_slots
        self._choice = Choice(slots, strategy, arguments)
        try:
            schedule = self._schedule(plan, limit)
        except Exception:
            self._choice = before
            raise
        self.mem_limit = limit
        for other in self._plans.values():
            if other is not plan:
                other.schedule = other.program = None
        return schedule

    def use_schedule(self, schedule: Schedule) -> None:
        """Run a schedule that was made elsewhere for `self.chain`; it is checked first."""
        plan = self._measured_plan()
        checked = Schedule.from_ops(plan.measurement.chain, schedule.ops, schedule.method)
        program = self._build_program(plan.measurement, checked)
        plan.schedule, plan.program, plan.limit_bytes = checked, program, None

    def _measure(self, value: Any) -> _Plan:
        modules = modules_inside(self._sequential)
        self._forget_plans_of_other_modules(modules)
        key = _signature(_tensors_of(value), modules, parameters_of(modules))
        measurement = measure_module(
            self._sequential, value, preserve_rng=self.preserve_rng_state, timer=self._timer
        )
        self._plans.pop(key, None)
        while len(self._plans) >= max(self.max_plans, 1):
            self._plans.pop(next(iter(self._plans)))
        self._plans[key] = plan = _Plan(measurement)
        self._current = key
        return plan

    def _schedule(self, plan: _Plan, limit: int | None) -> Schedule:
        measurement = plan.measurement
        if limit is None and self._choice.needs_limit:
            limit = free_limit_bytes(measurement.device, self.parameters())
        schedule = schedule_within(measurement, limit, self._choice)
        plan.program = self._build_program(measurement, schedule)
        plan.schedule, plan.limit_bytes = schedule, limit
        log.info("%s: peak %d bytes", schedule.method, schedule.peak_bytes)
        return schedule

    def _build_program(self, measurement: Measurement, schedule: Schedule) -> Program:
        return Program.build(
            measurement.stages, schedule.ops, (measurement.device,), self.preserve_rng_state
        )

    def _measured_plan(self) -> _Plan:
        plan = self._plans.get(self._current)
        if plan is None:
            raise NotMeasuredError(
                "nothing has been measured yet. Call measure(sample), or give a sample to "
                "Checkpointable(module, sample)."
            )
        return plan

    def _scheduled_plan(self) -> tuple[_Plan, Schedule]:
        plan = self._measured_plan()
        if plan.schedule is None:
            raise NotMeasuredError(
                "there is no schedule yet. Call compute_sequence(mem_limit), or run a training "
                "step."
            )
        return plan, plan.schedule

    @contextmanager
    def _in_training_mode(self) -> Iterator[None]:
        if self.training:
            yield
            return
        modules = list(self.modules())
        flags = [module.training for module in modules]
        self.train()
        try:
            yield
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag
            self._sequential.training = self.training

    # -- running ----------------------------------------------------------------------------

    def forward(self, input: Any) -> Any:
        """Return what the module returns; in training mode, ready for a plain `backward()`."""
        if not self.training or not torch.is_grad_enabled():
            return self._sequential(input)
        tensors = _tensors_of(input)
        modules = modules_inside(self._sequential)
        parameters = parameters_of(modules)
        if not any(t.requires_grad for t in (*tensors, *parameters)):
            return self._sequential(input)
        key = _signature(tensors, modules, parameters)
        return run_program(self._program_for(key, input, tensors, modules), input)

    def _program_for(
        self, key: Hashable, value: Any, tensors: Tensors, modules: list[nn.Module]
    ) -> Program:
        self._forget_plans_of_other_modules(modules)
        plan = self._plans.get(key)
        if plan is None and self._plans and self.new_inputs == "error":
            raise NotMeasuredError(
                f"the input ({_describe(tensors)}) or the module's state differs from what was "
                f"measured. Call measure() and compute_sequence() for it, or use "
                f"new_inputs='plan'."
            )
        if plan is None:
            if self.mem_limit is None and self._choice.strategy == "optimal":  # before long work
                free_limit_bytes(_first_device(tensors, self), self.parameters())
            plan = self._measure(value)
        self._current = key
        if plan.program is None:
            limit = in_bytes(self.mem_limit, plan.measurement)
            self._schedule(plan, limit)
            self.mem_limit = limit
        assert plan.program is not None
        return plan.program

    def _forget_plans_of_other_modules(self, present: list[nn.Module]) -> None:
        # Otherwise a module that was replaced, at any depth, would still run.
        if present != self._planned_modules:
            self._plans.clear()
            self.__dict__["_planned_modules"] = present

    def train(self, mode: bool = True) -> Checkpointable:
        """Set the mode of this module and of the given one."""
        super().train(mode)
        self._sequential.training = mode
        return self

    def __len__(self) -> int:
        return len(self._sequential)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._sequential)

    def __getitem__(self, index: Any) -> Any:
        """Return a child, or a plain `nn.Sequential` of a slice of them."""
        return self._sequential[index]

    # -- inspection -------------------------------------------------------------------------

    @property
    def mem_slots(self) -> int:
        """The number of slots into which the solver divides the limit."""
        return self._choice.slots

    @property
    def chain(self) -> Chain:
        """The measured chain of stages; the output is held beside it (`held_bytes`)."""
        return self._measured_plan().measurement.chain

    @property
    def held_bytes(self) -> int:
        """Bytes that a step holds from start to end beside the chain, mainly the output."""
        return self._measured_plan().measurement.held_bytes

    @property
    def schedule(self) -> Schedule:
        """The schedule in use, for the input measured or run last."""
        return self._scheduled_plan()[1]

    @property
    def timeline(self) -> MemoryTimeline:
        """The predicted memory over time, without `held_bytes`."""
        plan, schedule = self._scheduled_plan()
        return schedule.timeline(plan.measurement.chain)

    def get_expected_makespan(self) -> float:
        """Return the predicted time of forward and backward, in milliseconds."""
        return self._scheduled_plan()[1].makespan_ms

    def get_expected_memory(self) -> int:
        """Return the predicted peak in bytes, to be compared with the limit."""
        plan, schedule = self._scheduled_plan()
        return schedule.peak_bytes + plan.measurement.held_bytes

    def display(self) -> None:
        """Print the schedule, what it is predicted to cost, and memory over time."""
        print(self)

    def save_timeline(self, path: str | Path) -> None:
        """Write a picture of the schedule, memory over time, to an SVG file."""
        save_timeline(self.timeline, path, self.held_bytes)

    def __repr__(self) -> str:
        plan = self._plans.get(self._current)
        modules = len(flatten(self._sequential))
        if plan is None:
            return f"Checkpointable({modules} modules, not measured yet)"
        head = f"Checkpointable({modules} modules in {len(plan.measurement.stages)} stages"
        if plan.schedule is None:
            return f"{head}, no schedule yet)"
        text = plan_text(
            plan.measurement.chain, plan.schedule, plan.measurement.held_bytes, plan.limit_bytes
        )
        return f"{head})\n{text}"


def _either(name: str, value: Value, published: str, other: Value) -> Value:
    """Return what was given under one of two names."""
    if value is not None and other is not None:
        raise TypeError(f"{name} and {published} name the same argument, and both were given")
    return other if value is None else value


def _signature(
    tensors: Tensors, modules: list[nn.Module], parameters: list[nn.Parameter]
) -> Hashable:
    """Return what a plan depends on. This runs at every step."""
    inputs = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)
    kinds = sorted({"cpu", *(t.device.type for t in tensors)})
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    )
    return (
        inputs,
        tuple([(p.dtype, p.device, p.requires_grad) for p in parameters]),
        tuple([module.training for module in modules]),
        autocast,
    )


def _tensors_of(value: Any) -> Tensors:
    try:
        return pack(value)[0]
    except TypeError as error:
        raise TypeError(
            f"a Checkpointable takes a tensor, or a tuple or list of tensors; got {error}. "
            f"Give what the first module's forward takes."
        ) from None


def _first_device(tensors: Tensors, module: nn.Module) -> torch.device:
    devices = [t.device for t in (*tensors, *module.parameters())]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _describe(tensors: Tensors) -> str:
    return ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors)
