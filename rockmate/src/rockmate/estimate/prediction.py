"""`estimate`: the bytes of a training step, and the extra time of each budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from rockmate import planners
from rockmate.arguments import OfSample, called_with
from rockmate.errors import ArgumentsError, InfeasibleBudgetError, UnknownChoiceError
from rockmate.estimate.costs_from_file import Cost, Costs, costs_named
from rockmate.estimate.sizes import Sizes, sizes_of
from rockmate.problems.link import Link
from rockmate.problems.problem import Problem
from rockmate.progress import Phases
from rockmate.reports.in_full import InFull
from rockmate.schedules.baselines import keeping_all_bytes
from rockmate.schedules.plan import Plan
from rockmate.schedules.report import format_bytes
from rockmate.settings import Budget, Settings, parse_budget
from rockmate.whole_step.loss import with_loss
from rockmate.whole_step.optimizers import check_optimizer

# Above this number of operations only the fastest planner makes the curve.
_MOST_NODES = 400
_NOT_ESTIMATED = {  # settings, and why not
    "opaque": "a step without content is recorded to the last operation",
    "compile": "what inductor makes of a step is known when it is compiled",
    "plan": "costs of a file count with cost=",
}
_NOTHING = 5e-4  # smaller extra times are not printed


@dataclass(frozen=True, eq=False)
class Unmeasured(Settings):
    """What functions take that run nothing, so that there are no measured times."""

    _: KW_ONLY
    cost: Any = "flops"
    optimizer: Any = "adamw"
    device: torch.device | str | None = None
    offload: Link | None = None  # type: ignore[assignment]
    function: ClassVar[str]  # its name, for errors

    def __post_init__(self) -> None:
        super().__post_init__()
        exact = {"split": "whether pieces have the bits of the whole is tried"}
        self.refuse(self.function, _NOT_ESTIMATED | (exact if self.split == "exact" else {}))

    def _check_offload(self) -> None:
        """Take a link in place of the name of a place, as nothing is measured."""
        link: Any = self.offload
        if link is not None and not isinstance(link, Link):
            raise ArgumentsError(
                f"{self.function} takes no offload={link!r}: nothing is measured. Give the link's "
                "own figures: offload=rockmate.planning.Link(out_bytes_per_ms, in_bytes_per_ms)"
            )
        if self.host_budget is not None:
            raise ArgumentsError(
                f"{self.function} takes no host_budget={self.host_budget!r}: Link(host_bytes=...) "
                "has it"
            )

    def _check_cost(self) -> None:
        """Leave it to `costs_named`."""

    def check_times(self, costs: Iterable[Costs]) -> None:
        """Refuse a link beside FLOPs.

        Raises:
            ArgumentsError: no costs were recorded.
        """
        if self.offload is not None and any(one.words == "FLOPs" for one in costs):
            raise ArgumentsError(
                f"offload= of {self.function} needs recorded costs: how long a copy takes says "
                "nothing beside FLOPs. Give cost=, with the path of a file that rk.save_plan "
                "wrote, or RecordedCosts"
            )


@dataclass(frozen=True, slots=True)
class Point:
    """A budget, and the extra time of the best plan for it, as a share of a plain step."""

    budget_bytes: int
    overhead: float
    bound: float | None = None  # no plan can have less

    def __str__(self) -> str:
        text = f"{format_bytes(self.budget_bytes):>12}  {100 * self.overhead:6.1f} %"
        if self.overhead < _NOTHING or self.bound is None:
            return text
        if self.overhead - self.bound < _NOTHING:
            return f"{text} (the least possible)"
        return f"{text} (no plan has less than {100 * self.bound:.1f} %)"


@dataclass(frozen=True)
class Estimate(InFull):
    """Memory and time of training a model; printing it shows a table. All sizes are in bytes.

    `activations_bytes` is the peak of a plain step above what is resident; budgets are counted
    the same way. Extra time is counted in FLOPs or in recorded milliseconds, as `times` says.
    """

    sizes: Sizes
    model: str
    device: str
    points: int
    times: str = "FLOPs"
    settings: Settings = field(default_factory=Settings, repr=False, compare=False)

    def __repr__(self) -> str:
        activations = format_bytes(self.activations_bytes)
        return f"<estimate of {self.model} on {self.device}: {activations} of activations>"

    @property
    def problem(self) -> Problem:
        """The step as planners see it."""
        return self.sizes.problem

    @property
    def parameters_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.sizes.parameters_bytes

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients of the parameters that require one."""
        return self.sizes.gradients_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state, in the type of the parameters."""
        return self.sizes.optimizer.state_bytes

    @property
    def optimizer(self) -> str:
        """The optimizer's name."""
        return self.sizes.optimizer.name

    @property
    def activations_bytes(self) -> int:
        """Peak of a plain forward and backward, above what is resident."""
        return self.sizes.plain_bytes

    @property
    def step_ms(self) -> float | None:
        """Time of the operations of a plain step by recorded costs, or None for FLOPs."""
        return None if self.times == "FLOPs" else self.problem.base_time_ms

    @cached_property
    def _enough_bytes(self) -> int:
        """The budget within which nothing is recomputed; a plain step holds some values longer."""
        return keeping_all_bytes(self.problem) + self.settings.reserve

    @property
    def total_bytes(self) -> int:
        """Total memory of a plain training step."""
        return self.sizes.resident_bytes + self.activations_bytes

    @cached_property
    def smallest_budget_bytes(self) -> int:
        """The smallest budget for which there is a plan."""
        least_bytes = self._least_peak_bytes() + self.settings.reserve
        return min(self._enough_bytes, least_bytes)

    def _least_peak_bytes(self) -> int:
        if self.problem.link is None and self.sizes.cutting is None:
            return planners.minimum_peak(self.problem)[1]
        try:
            return self._planned(1).peak_bytes
        except InfeasibleBudgetError as error:
            return error.minimum_bytes

    def _planned(self, budget_bytes: int) -> Plan:
        """Return a plan; with `split`, the fastest of those with and without pieces of rows."""
        chosen = self.settings
        is_large = len(self.problem.nodes) > _MOST_NODES and chosen.planner == "auto"
        plan = partial(
            planners.plan,
            budget_bytes=budget_bytes,
            planner="segments" if is_large else chosen.planner,
            effort=chosen.effort,
            backend=chosen.backend,
        )
        cutting = self.sizes.cutting
        return plan(self.problem) if cutting is None else cutting.chosen(plan)[1]

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        """Extra time over budget, from the budget that costs nothing down to the smallest."""
        phases = Phases(
            {"smallest budget": 1, "budgets": 2}, show=self.settings.progress, title="curve"
        )
        with phases.phase("smallest budget"):
            high, low = self._enough_bytes, self.smallest_budget_bytes
        shares = [1 - (i + 1) / self.points for i in range(self.points)]
        budgets = [low + round(share * (high - low)) for share in shares]
        found, asked = [Point(high, 0.0, 0.0)], dict.fromkeys(b for b in budgets if b < high)
        with phases.phase("budgets"):
            for budget in asked:
                phases.note(f"budget {len(found)} of {len(asked)}", (len(found) - 1) / len(asked))
                found.append(self.at(budget))
        phases.close("curve of extra time")
        return tuple(found)

    def at(self, budget: Budget) -> Point:
        """Return the extra time within a budget: bytes, text, or a fraction of a plain step's peak.

        Raises:
            InfeasibleBudgetError: no plan fits; `.minimum_bytes` is the smallest budget that does.
        """
        budget_bytes, fraction = parse_budget(budget)
        if budget_bytes is None:
            assert fraction is not None
            budget_bytes = int(fraction * self.activations_bytes)
        if budget_bytes >= self._enough_bytes:
            return Point(budget_bytes, 0.0, 0.0)
        plan = self._planned(budget_bytes - self.settings.reserve)
        base = plan.base_time_ms
        bound = None if plan.bound_ms is None or not base else max(0.0, plan.bound_ms / base - 1)
        return Point(budget_bytes, plan.overhead, bound)

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions of the figures, and where they may be wrong."""
        found = [
            f"extra time is counted in {self.times}",
            "what libraries keep for themselves on the device (cuBLAS, cuDNN) comes on top",
        ]
        link = self.problem.link
        if link is not None:
            found.append(
                f"storages may be moved at {link.out_bytes_per_ms / 1e6:.3g} GB/s out and "
                f"{link.in_bytes_per_ms / 1e6:.3g} GB/s in, as given"
            )
        if self.sizes.cutting is not None:
            found.append("what is too large runs in pieces of rows, where that is faster or fits")
        if self.sizes.uncalled:
            names = ", ".join(self.sizes.uncalled[:6])
            found.append(
                f"workspace of {names} is taken to be nothing: these are too large to be tried"
            )
        if self.sizes.missing:
            names = ", ".join(self.sizes.missing[:6])
            found.append(f"no cost was recorded for {names}; its time is taken by FLOPs and bytes")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, for JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "optimizer": self.optimizer,
            "parameters_bytes": self.parameters_bytes,
            "gradients_bytes": self.gradients_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "buffers_bytes": self.sizes.buffers_bytes,
            "inputs_bytes": self.sizes.inputs_bytes,
            "activations_bytes": self.activations_bytes,
            "total_bytes": self.total_bytes,
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "times": self.times,
            "step_ms": self.step_ms,
            "curve": [
                {"budget_bytes": p.budget_bytes, "overhead": p.overhead, "bound": p.bound}
                for p in self.curve
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            (f"state of {self.optimizer}", self.optimizer_bytes),
            ("buffers and inputs", self.sizes.buffers_bytes + self.sizes.inputs_bytes),
            ("activations of a plain step", self.activations_bytes),
            ("all together", self.total_bytes),
            ("smallest budget for activations", self.smallest_budget_bytes),
        ]
        lines = [f"{self.model} on {self.device}, {len(self.problem.nodes)} operations"]
        lines += [f"  {name:<34}{format_bytes(size):>14}" for name, size in rows]
        if self.step_ms is not None:
            lines.append(f"  {'operations of a plain step':<34}{self.step_ms:>11.1f} ms")
        lines += ["  extra time over budget:", *(f"    {point}" for point in self.curve)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True, eq=False)
class ToEstimate(Unmeasured, OfSample):
    """What `estimate` takes."""

    _: KW_ONLY
    cost: Cost = "flops"  # type: ignore[assignment]
    points: int = 4
    function = "estimate"


@called_with(ToEstimate)
def estimate(given: ToEstimate) -> Estimate:
    """Return the memory and extra time of training `model` on `sample`, without running anything.

    Model and sample may be on the device `meta` and then need no memory. One step is recorded from
    sizes alone, as it would run on `device` (default: the first GPU, or else the CPU).

    Keywords are the fields of `Settings` beside these. Of several `samples`, the one with the
    largest plain step counts. Settings about running steps change nothing here.

    Args:
        model: the module, in train mode.
        sample: the first argument, a tuple of arguments, or a dict of keyword arguments.
        kwargs: keyword arguments of the sample, beside positional ones.
        optimizer: its state is counted: "adamw", "sgd", "sgd-momentum", "lion", "none", …, or the
            optimizer itself.
        device: where the step will run; this machine must have it.
        points: number of budgets of the curve below a plain step's peak.
        cost: the unit of extra time: "flops"; `rkgb.FlopCost(flops_per_byte=...)` for a device that
            is not here; or costs that were recorded for this call, perhaps on another machine: the
            path of a file that `rk.save_plan` wrote, an `rkgb.RecordedCosts`, or the path of one.
            Recorded costs also give the workspace of every kernel.
        offload: a `rockmate.planning.Link` with the figures of the link over which storages may be
            moved. It takes recorded costs: its times are nothing beside FLOPs.

    Example:
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(config)
        ...     tokens = torch.zeros(1, 2048, dtype=torch.long)
        >>> print(rockmate.estimate(model, {"input_ids": tokens, "labels": tokens}))

    Raises:
        rkgb.DataDependentError: the forward reads values, and tensors here have none.
        rkgb.TraceError: the step cannot be recorded.
        UnknownChoiceError: the optimizer or the cost is unknown, or there is no such device.
        PlanMismatchError: the recorded costs are for another call.
        ArgumentsError: a link is given without recorded costs.
        PlanFileError, rkgb.InvalidGraphError: the file of costs cannot be read.
    """
    model, optimizer = with_loss(given.model, given.loss), given.optimizer
    where = usual_device(given.device)
    costs = costs_named(given.cost)
    given.check_times([costs])
    if isinstance(optimizer, str):
        check_optimizer(optimizer)
    shares = {"recording": 3, "costs": 2, "bytes": 1}
    phases = Phases(shares, show=given.progress, title="estimate")
    with phases:
        found = [
            sizes_of(
                *(model, args, kwargs, optimizer, where, costs, phases, given.offload),
                split=bool(given.split),
            )
            for args, kwargs in given.calls()
        ]
    phases.close("estimate")
    sizes = max(found, key=lambda sizes: sizes.plain_bytes)
    name = type(model).__name__
    points, settings = max(1, given.points), given.settings(cost="flops", offload=None)
    return Estimate(sizes, name, str(where), points, costs.words, settings)


def usual_device(device: torch.device | str | None) -> torch.device:
    """Return the device of a step: the given one, or the first GPU, or the CPU.

    Raises:
        UnknownChoiceError: no device has this name, or this machine has none.
    """
    there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if device is None:
        return torch.device(there[0] if there else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UnknownChoiceError("device", device, ["cpu", *there]) from None
    if found.type == "cuda" and (found.index or 0) >= len(there):
        raise UnknownChoiceError("device", str(device), ["cpu", *there])
    return found
