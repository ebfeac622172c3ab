"""Plan a module in place, and undo it: the same object, of its own class and of `Rockmate`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rockmate.arguments import Arguments, called_with, maker
from rockmate.blockwise.loss_outside import StepHook
from rockmate.decisions import DecidingModule
from rockmate.errors import ArgumentsError, RockmateError
from rockmate.module import (
    Rockmate,
    classes,
    dressed,
    is_applied,
    plain_of,
    plain_view,
    refuse_no_output,
)
from rockmate.settings import Budget

_FIRST_STEP = object()  # the batch of the first training step is the sample


@dataclass(frozen=True, eq=False)
class InPlace(Arguments):
    """What `apply` takes; the sample may be left out."""

    sample: Any = _FIRST_STEP


@called_with(InPlace)
def apply(given: InPlace) -> nn.Module:
    """Plan `model` in place: from now on its own forward runs within the budget.

    It stays the same object, of its class (and of `Rockmate`), with the same name, configuration,
    hooks and state dict. So trainers and `save_pretrained` work as before. Arguments, exactness and
    errors are those of `Rockmate`. Without a sample, the model is planned at the first training
    step, for its batch and its precision. `remove` undoes it.

    Examples:
        >>> rockmate.apply(model, x, "2GiB") is model
        True
        >>> model(x).sum().backward()  # within 2 GiB
        >>> rockmate.remove(model)
        >>> rockmate.apply(model, budget="2GiB")  # planned at the first training step
    """
    model, is_sampled = given.model, given.sample is not _FIRST_STEP
    given.check_in_place("rockmate.apply")
    if not is_sampled and (given.kwargs is not None or given.samples):
        raise ArgumentsError("rockmate.apply takes kwargs and samples beside a sample only")
    if not is_applied(model):
        plain_of(model)  # refuses anything but a module
    planned = DecidingModule(plain_view(model), given.terms())
    if is_sampled:
        planned.prepare(given.calls())
        refuse_no_output(planned)
    return dressed(remove(model), planned)


def in_trainer(
    budget: Budget | None, memory: Budget | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords of `apply` for a trainer, which makes its optimizer later.

    Raises:
        RockmateError: as from `checked`.
    """
    within = amount(budget, memory)
    later = {} if within["memory"] is None else {"optimizer": "none", **options}
    return checked({**options, **later, **within}, "rockmate.apply")


def amount(budget: Any = None, memory: Any = None) -> dict[str, Any]:
    """Return what is given, or else what the environment says.

    `ROCKMATE_BUDGET=8GB` or `ROCKMATE_MEMORY=24GB` serve where a switch of a trainer is given
    neither: a training is planned without a word in its code.
    """
    if budget is None and memory is None:
        budget, memory = (os.environ.get(f"ROCKMATE_{name}") for name in ("BUDGET", "MEMORY"))
    return {"budget": budget, "memory": memory}


def checked(options: dict[str, Any], function: str) -> dict[str, Any]:
    """Return keywords of `apply` that are to serve later.

    Raises:
        RockmateError: neither a budget nor memory is given, it cannot be read, or an option is
            unknown.
    """
    # Submodules are not known yet.
    known = {name: value for name, value in options.items() if name != "opaque"}
    given = maker(InPlace, function)(nn.Module(), **known)
    given.check_in_place(function)
    return options


def meet_optimizer(model: nn.Module | None, optimizer: Any, options: Mapping[str, Any]) -> None:
    """Count a trainer's optimizer in a model's memory, unless the user has given one."""
    if not isinstance(model, Rockmate) or not optimizer:
        return
    planned = model._rockmate
    whole = planned.settings.whole_step
    if whole is not None and isinstance(options.get("optimizer"), str):
        whole = replace(whole, optimizer=optimizer)
        planned.settings = replace(planned.settings, whole_step=whole)


def remove(model: nn.Module) -> nn.Module:
    """Return the plain `model`: undo `apply` or `apply_to_blocks`, or unwrap a `Rockmate`.

    Raises:
        RockmateError: something else has changed its class since `apply`; undo that first.
    """
    if not isinstance(model, Rockmate):
        for block in list(model.modules()):
            planned = vars(block).get("_rockmate")
            if planned is not None and planned.settings.most_kept_bytes is not None:
                remove(block)
            for hook in list(block._forward_pre_hooks.values()):
                if isinstance(hook, StepHook):
                    hook.stop()
        return model
    if not is_applied(model):
        return model.original
    base = type(model).__bases__[-1]
    if classes.get((Rockmate, base, False)) is not type(model):
        raise RockmateError(
            f"the class of {type(model).__name__} was changed since rockmate.apply (as FSDP does), "
            "so that apply cannot be undone. Undo that change first."
        )
    del vars(model)["_rockmate"]
    object.__setattr__(model, "__class__", base)
    return model
