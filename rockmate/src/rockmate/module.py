"""`Rockmate`: a module like the original, whose training step stays inside a budget."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from rockmate.budget import Budget
from rockmate.choices import check_choices
from rockmate.errors import InputMismatchError, RockmateError
from rockmate.pipeline import Planned, Settings, plan_module
from rockmate.plan_report import PlanReport
from rockmate.runtime.module_state import ExternalValues, ModuleGuard

_log = logging.getLogger("rockmate")


class Rockmate(nn.Module):
    """Wrap `model` so that forward + backward hold at most `budget` above what is resident.

    Outputs, gradients, buffers and the random stream are bit-equal to the original's. The wrapper
    shares the original's parameters, buffers and submodules: optimizers, `state_dict` and `.to`
    work on either. In `eval()` mode and under `no_grad()` the original runs as it is.

    Args:
        model: the module, in train mode, on one device with the sample.
        sample: the first argument, a tuple of arguments, or a dict of keyword arguments.
        budget: bytes (int), text (`"2GiB"`, `"800 MB"`, `"40%"`), or a fraction in (0, 1] of
            eager's activation peak. Parameters, buffers, inputs and parameter gradients are
            resident and not counted; activations, outputs, their gradients, recomputation and
            kernel workspace are.
        kwargs: keyword arguments of the sample, beside positional ones.
        effort: how long to search: "fast", "balanced", "best", or seconds.
        cost: what to minimise: "measured" time, or deterministic "flops".
        self_test: run one step against eager PyTorch after planning and compare bits and bytes.
        reserve: bytes of the budget to leave to a loss computed outside the module.
        max_plans: how many kinds of input to plan for. A call unlike all planned ones (another
            batch size, another autocast region) is planned on the spot, within the same budget in
            bytes, until so many plans exist; then it is refused. 1 refuses all but the sample's.
        planner: "auto", or the name of one strategy, for comparisons.
        backend: solver of the block problems: "cp-sat", "cbc", "highs" or "gurobi".
        progress: show a progress bar while planning.

    Raises:
        InfeasibleBudgetError: no plan fits; `.minimum_bytes` is the smallest budget that does.
        RockmateError, rkgb.RkgbError: the module cannot be run exactly; the text says why. The
            module is left as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        budget: Budget,
        *,
        kwargs: Mapping[str, Any] | None = None,
        effort: str | float = "fast",
        cost: Literal["measured", "flops"] = "measured",
        self_test: bool = True,
        reserve: int = 0,
        max_plans: int = 4,
        planner: str = "auto",
        backend: str = "cp-sat",
        progress: bool = False,
    ) -> None:
        check_choices(cost=cost, effort=effort, planner=planner, backend=backend)
        settings = Settings(
            budget, effort, cost, self_test, reserve, planner, backend, progress, max_plans
        )
        planned = plan_module(model, sample, kwargs, settings)
        super().__init__()
        # Later plans get the same bytes, whatever a fraction of *their* eager peak would be.
        self._adopt(model, replace(settings, budget=planned.budget_bytes), [planned])

    def _adopt(self, model: nn.Module, settings: Settings, plans: list[Planned]) -> None:
        # Not submodules: the wrapper *has* the original's tables, so that names stay the same.
        vars(self)["original"] = model
        vars(self)["_settings"] = settings
        vars(self)["_plans"] = plans
        vars(self)["_guard"] = ModuleGuard(model)
        vars(self)["_values"] = [self._values_of(planned) for planned in plans]
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training

        # Trainers look at the signature of forward; torch.compile must not trace the executor.
        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        vars(self)["forward"] = torch.compiler.disable(forward)

    # ------------------------------------------------------------------ running

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; bounded when it trains, the original when it does not."""
        original: nn.Module = self.original
        if not self.training or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        vars(self)["_guard"].check()
        place, leaves = self._planned_for(args, kwargs)
        planned: Planned = vars(self)["_plans"][place]
        return planned(original, vars(self)["_values"][place], leaves)

    def _values_of(self, planned: Planned) -> ExternalValues:
        return ExternalValues(planned.network.graph.dataflow.basic, self.original)

    def _planned_for(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, list[Any]]:
        plans: list[Planned] = vars(self)["_plans"]
        settings: Settings = vars(self)["_settings"]
        refusal: InputMismatchError | None = None
        for place, planned in enumerate(plans):
            try:
                return place, planned.signature.check(args, kwargs)
            except InputMismatchError as error:
                refusal = refusal or error
        if refusal is not None and len(plans) >= settings.max_plans:
            raise refusal
        _log.info("planning for another kind of input: %s", refusal)
        plans.append(plan_module(self.original, args, kwargs, settings))
        vars(self)["_values"].append(self._values_of(plans[-1]))
        return len(plans) - 1, plans[-1].signature.check(args, kwargs)

    def backward(self) -> None:
        """Do nothing: `loss.backward()` has done it all. Kept for the published examples."""

    # ------------------------------------------------------------------ the plan

    @property
    def _first(self) -> Planned:
        plans: list[Planned] = vars(self)["_plans"]
        if not plans:
            raise RockmateError(
                "this Rockmate module was loaded from a file and has not been planned here yet; "
                "run one training step first."
            )
        return plans[0]

    @property
    def plan(self) -> PlanReport:
        """The plan for the sample; printing it shows what is recomputed and at what price."""
        first = self._first
        return PlanReport(first.problem, first.plan, first.executor.planned.compiled.source)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes, fraction resolved."""
        return self._first.budget_bytes

    @property
    def planning_seconds(self) -> Mapping[str, float]:
        """Seconds that each phase of planning took."""
        return self._first.seconds

    @property
    def eager_peak_bytes(self) -> int | None:
        """Measured activation peak of the eager module; None if no eager step was run."""
        return self._first.eager_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak that the allocator counted in the self-test; None if it was left out."""
        return self._first.measured_peak_bytes

    # ------------------------------------------------------------------ manners of the original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in vars(self):
                raise
            return getattr(vars(self)["original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rockmate:
        """Copy the module; plans hold no tensors and are shared."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        nn.Module.__init__(new)
        plans: list[Planned] = vars(self)["_plans"]
        new._adopt(copy.deepcopy(self.original, memo), vars(self)["_settings"], list(plans))
        return new

    def __reduce__(self) -> Any:
        """Save the module and the settings; the first training step after loading plans anew."""
        return _load, (self.original, vars(self)["_settings"])

    def train(self, mode: bool = True) -> Rockmate:
        """Switch the wrapper, the original and all submodules."""
        self.original.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original's state dict."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the original."""
        return self.original.load_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name what is wrapped and how."""
        if not vars(self)["_plans"]:
            return f"{type(self.original).__name__}, not planned yet"
        plan = self._first.plan
        return (
            f"{type(self.original).__name__}, budget {self.budget_bytes} bytes, predicted peak "
            f"{plan.peak_bytes} bytes, overhead {100 * plan.overhead:.1f} %"
        )


def _load(model: nn.Module, settings: Settings) -> Rockmate:
    module = Rockmate.__new__(Rockmate)
    nn.Module.__init__(module)
    module._adopt(model, settings, [])
    return module
