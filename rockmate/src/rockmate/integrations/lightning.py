"""The callback for Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from rockmate.errors import RockmateError
from rockmate.in_place import amount, apply, in_trainer, meet_optimizer
from rockmate.module import Rockmate
from rockmate.settings import Budget


class LightningCallback(Callback):
    """Train a network inside a `LightningModule` within `budget`.

    `training_step` itself is no forward, so the budget is for the network that it calls. `module`
    is the path of that network; it may be left out if only one child has parameters. The plan is
    made at the first training step, from its batch. The network stays the same object.

    Args:
        budget: bytes, text such as `"8GB"`, or a fraction of the peak of a plain step. If
            neither it nor `memory` is given, `ROCKMATE_BUDGET` or `ROCKMATE_MEMORY` counts.
        memory: instead of a budget, the limit of a whole step with everything: `"24GB"`, or
            "device" for the device's memory. The task's optimizers are counted.
        module: path of the network in the `LightningModule`.
        report: path of a page that shows the plan, written after the first step (see
            `rk.plan.html`); only the first process writes it.
        options: further keywords of `rockmate.apply`.

    Examples:
        >>> trainer = Trainer(callbacks=[LightningCallback(budget="8GB", module="model")])
        >>> trainer.fit(task, loader)
        >>> print(task.model.plan)

    Raises:
        RockmateError: there is no such module, or not exactly one child with parameters.
        InfeasibleBudgetError, rkgb.RkgbError: at the first step, as from `rockmate.apply`.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        module: str = "",
        *,
        memory: Budget | None = None,
        report: str | None = None,
        **options: Any,
    ) -> None:
        self.module, self.report = module, report
        self.options = in_trainer(budget, memory, options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the network, after `configure_model` has made it."""
        network = self._network(pl_module)
        if not isinstance(network, Rockmate):
            apply(network, **self.options)
        meet_optimizer(network, trainer.optimizers, self.options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Write the report, once there is a plan."""
        if self.report is not None and trainer.is_global_zero:
            network = self._network(pl_module)
            assert isinstance(network, Rockmate)
            network.plan.html(self.report)
            self.report = None

    def _network(self, task: nn.Module) -> nn.Module:
        if self.module:
            try:
                return task.get_submodule(self.module)
            except AttributeError as error:
                raise RockmateError(
                    f"{type(task).__name__} has no submodule '{self.module}': {error}. Give "
                    "LightningCallback the path of the network that training_step calls."
                ) from None
        children = [
            n for n, child in task.named_children() if any(True for _ in child.parameters())
        ]
        if len(children) != 1:
            raise RockmateError(
                f"{type(task).__name__} has {len(children)} children with parameters "
                f"({', '.join(children) or 'none'}), so that the network to plan is not known. "
                "Name it: LightningCallback(budget, module='...')."
            )
        return task.get_submodule(children[0])


def callbacks_by_environment() -> list[Callback]:
    """Return a switch, if the environment has an amount: Lightning asks at every `Trainer`.

    It is found by its entry point (`lightning.pytorch.callbacks_factory`).
    """
    return [LightningCallback()] if any(amount().values()) else []
