"""`Rockmate`: a module like the original, whose training step stays inside a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from rockmate.budget import Budget
from rockmate.guards import refuse_ambient_modes
from rockmate.pipeline import Planned, Settings, plan_module
from rockmate.plan_report import PlanReport


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
        planner: "auto", or the name of one strategy, for comparisons.
        backend: solver of the block problems, "cp-sat" or "cbc".
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
        planner: str = "auto",
        backend: str = "cp-sat",
        progress: bool = False,
    ) -> None:
        settings = Settings(budget, effort, cost, self_test, reserve, planner, backend, progress)
        planned = plan_module(model, sample, kwargs, settings)
        super().__init__()
        # Not submodules: the wrapper *has* the original's tables, so that names stay the same.
        vars(self)["original"] = model
        vars(self)["_planned"] = planned
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training

    # ------------------------------------------------------------------ running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; bounded when it trains, the original when it does not."""
        original: nn.Module = self.original
        if not self.training or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        planned: Planned = vars(self)["_planned"]
        planned.guard.check()
        refuse_ambient_modes(planned.executor.runner.device)
        return planned(original, args, kwargs)

    def backward(self) -> None:
        """Do nothing: `loss.backward()` has done it all. Kept for the published examples."""

    # ------------------------------------------------------------------ the plan

    @property
    def plan(self) -> PlanReport:
        """The plan; printing it shows what is recomputed and at what price."""
        planned: Planned = vars(self)["_planned"]
        return PlanReport(planned.calibration.problem, planned.plan)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes, fraction and reserve resolved."""
        planned: Planned = vars(self)["_planned"]
        return planned.budget_bytes

    @property
    def planning_seconds(self) -> Mapping[str, float]:
        """Seconds that each phase of planning took."""
        planned: Planned = vars(self)["_planned"]
        return planned.seconds

    @property
    def eager_peak_bytes(self) -> int | None:
        """Measured activation peak of the eager module; None if no eager step was run."""
        planned: Planned = vars(self)["_planned"]
        return planned.eager_peak_bytes

    # ------------------------------------------------------------------ manners of the original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in vars(self):
                raise
            return getattr(vars(self)["original"], name)

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
        plan = vars(self)["_planned"].plan
        return (
            f"{type(self.original).__name__}, budget {plan.budget_bytes} bytes, predicted peak "
            f"{plan.peak_bytes} bytes, overhead {100 * plan.overhead:.1f} %"
        )
