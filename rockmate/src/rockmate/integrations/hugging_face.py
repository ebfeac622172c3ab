"""The callback for Hugging Face's `Trainer` and its subclasses, and its words on a command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from rockmate.in_place import amount, apply, in_trainer, meet_optimizer
from rockmate.module import Rockmate
from rockmate.settings import Budget


class RockmateCallback(TrainerCallback):
    """Train the trainer's model within `budget`, or `memory`; everything else stays as it is.

    The plan is made at the first training step, from its batch. The model stays the same object of
    the same class, so evaluation, metrics, `generate`, `save_pretrained`, checkpoints and resuming
    work as before. `gradient_checkpointing=True` has no effect: the plan decides what is
    recomputed. Gradient accumulation and mixed precision are planned as they occur. With
    `auto_find_batch_size=True`, a smaller batch is tried if one does not fit.
    `rockmate.remove(trainer.model)` undoes it.

    Args:
        budget: bytes, text such as `"8GB"`, or a fraction of the peak of a plain step. If
            neither it nor `memory` is given, `ROCKMATE_BUDGET` or `ROCKMATE_MEMORY` counts.
        memory: instead of a budget, the limit of a whole step with everything: `"24GB"`, or
            "device" for the device's memory. The trainer's optimizer is counted.
        report: path of a page that shows the plan, written after the first step (see
            `rk.plan.html`); only the first process writes it.
        options: further keywords of `rockmate.apply`.

    Examples:
        >>> trainer = Trainer(model, arguments, callbacks=[RockmateCallback(budget="8GB")], ...)
        >>> trainer.train()
        >>> print(trainer.model.plan)

    Raises:
        InfeasibleBudgetError, RockmateError, rkgb.RkgbError: at the first step, as from
            `rockmate.apply`.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        memory: Budget | None = None,
        report: str | None = None,
        **options: Any,
    ) -> None:
        self.report, self.options = report, in_trainer(budget, memory, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Plan the trainer's model, whose forward others have put in place by now, as TRL does."""
        model = given.get("model")
        if model is not None and not isinstance(model, Rockmate):
            apply(model, **self.options)
        meet_optimizer(given.get("model"), given.get("optimizer"), self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the report, once there is a plan."""
        model = given.get("model")
        if self.report is None or not state.is_world_process_zero:
            return
        if isinstance(model, Rockmate):
            model.plan.html(self.report)
            self.report = None


@dataclass
class RockmateArguments:
    """What a script's command line says, beside `TrainingArguments`, for `HfArgumentParser`.

    Examples:
        >>> parser = HfArgumentParser((TrainingArguments, RockmateArguments))
        >>> arguments, within = parser.parse_args_into_dataclasses()  # ... --memory 24GB
        >>> trainer = Trainer(model, arguments, callbacks=within.callbacks(), ...)
    """

    budget: str | None = field(
        default=None,
        metadata={"help": "what forward and backward may hold: 8GB, or 60% of a plain step"},
    )
    memory: str | None = field(
        default=None,
        metadata={"help": "what a whole step may take with everything: 24GB, or device"},
    )
    plan_report: str | None = field(
        default=None, metadata={"help": "write a page that shows the plan to this file"}
    )

    def callbacks(self) -> list[TrainerCallback]:
        """Return the callback that plans, or none where no amount is given here or by the
        environment.

        Raises:
            BudgetFormatError, ArgumentsError: an amount cannot be read, or both are given.
        """
        given = amount(self.budget, self.memory)
        if given["budget"] is None and given["memory"] is None:
            return []
        return [RockmateCallback(**given, report=self.plan_report)]
