"""The arguments of `Rockmate` and related functions: one class each, from one definition.

A function gets one object with all its arguments; `called_with` gives it the signature of that
object's class. So names, defaults and types are written once, in `Settings` and here. Editors, type
checkers, `help` and `inspect.signature` see them in every function.

    Settings < OfSample < Arguments     Rockmate
                        < ToEstimate    estimate
"""

from __future__ import annotations

import contextvars
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from torch import nn

from rkgb.engine import bind_inputs
from rkgb.torch_api import is_optimized
from rockmate.errors import ArgumentsError, UnsupportedModuleError
from rockmate.settings import Budget, Settings, Terms, parse_budget, parse_memory
from rockmate.whole_step.loss import Loss
from rockmate.whole_step.optimizers import check_optimizer
from rockmate.whole_step.whole_step import WholeStep

_PER_CALL = 1  # placeholder: each call gets its own budget
Call = tuple[tuple[Any, ...], Mapping[str, Any]]
P = ParamSpec("P")
Given = TypeVar("Given")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def refuse_no_module(model: Any) -> nn.Module:
    """Return the given model if it is a module.

    Raises:
        UnsupportedModuleError: it is no `torch.nn.Module`.
    """
    if isinstance(model, nn.Module):
        return model
    hint = "The sample is the second argument."
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = f"{model.__name__} is a class: give one of its objects, {model.__name__}(...)."
    elif callable(model):
        hint = "Put what it computes into the forward of a module written in Python."
    raise UnsupportedModuleError(
        f"the model comes first, as in Rockmate(model, sample, budget); a {type(model).__name__} "
        f"was given instead of a torch.nn.Module. {hint}"
    )


@dataclass(frozen=True, eq=False)
class OfSample(Settings):
    """A module, and its future calls.

    Args:
        model: the module, in train mode, on one device with the sample.
        sample: the first argument, a tuple of arguments, or a dict of keyword arguments.
        kwargs: keyword arguments of the sample, beside positional ones.
        samples: more samples to plan for at once. A fraction as budget is one of the largest.
        loss: a function of the outputs, and of targets that calls have behind the model's arguments
            or by name, to be planned with the module: `loss, outputs = rk(x, target)`.
    """

    model: nn.Module
    sample: Any
    _: KW_ONLY
    kwargs: Mapping[str, Any] | None = None
    samples: Sequence[Any] = ()
    loss: Loss | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_optimized(self.model):
            return  # removed when the model is read
        refuse_no_module(self.model)
        modules = dict(self.model.named_modules()) if self.opaque else {}
        for path in self.opaque:
            if path not in modules:
                near = difflib.get_close_matches(path, modules, 1)
                raise UnsupportedModuleError(
                    f"opaque names '{path}', and {type(self.model).__name__} has no such "
                    "submodule; give paths as model.named_modules() does"
                    + (f", such as '{near[0]}'." if near else ".")
                )

    def calls(self) -> list[Call]:
        """Return the sample and further samples as calls."""
        return [bind_inputs(self.sample, self.kwargs), *map(bind_inputs, self.samples)]


@dataclass(frozen=True, eq=False)
class Arguments(OfSample):
    """A module and its calls, with a budget.

    Args:
        budget: bytes (int), text (`"2GiB"`, `"800 MB"`, `"40%"`), or a fraction in (0, 1] of
            eager's activation peak. Parameters, buffers, inputs and parameter gradients are
            resident and not counted; activations, outputs, their gradients, recomputation and
            kernel workspace are.
        memory: instead of a budget, the limit of a whole step with everything: bytes, text
            (`"24GB"`), or "device" for the device's memory. The budget is what parameters,
            gradients, the optimizer and other users leave; `rk.memory` shows it.
        optimizer: with `memory`, the optimizer, or its name ("adamw", "sgd", "none", ...); a list
            or dict of them if each one steps in the backward. A list also takes modules that stay
            beside the model, such as an average of its weights.
    """

    budget: Budget | None = None
    _: KW_ONLY
    memory: Budget | None = None
    optimizer: Any = None

    def check_amount(self, function: str) -> None:
        """Refuse arguments without exactly one readable amount of memory.

        Raises:
            ArgumentsError: there is neither a budget, nor memory with an optimizer, or both.
            BudgetFormatError: the amount cannot be read.
        """
        if self.budget is None and self.memory is None:
            raise ArgumentsError(
                f"{function} needs a budget: {function}(model, budget='8GB'), or "
                "memory='24GB', optimizer=optimizer for all that a step takes"
            )
        if self.budget is not None and self.memory is not None:
            raise ArgumentsError(
                f"{function} takes budget= or memory=, and got both: {self.budget!r} for "
                f"activations, {self.memory!r} for everything. Leave one out"
            )
        if self.memory is None:
            if self.optimizer is not None:
                raise ArgumentsError(
                    f"{function} takes optimizer= only with memory=: a budget does not include its "
                    "state"
                )
            assert self.budget is not None
            parse_budget(self.budget)
            return
        parse_memory(self.memory)
        if self.optimizer is None:
            raise ArgumentsError(
                f"{function} needs the optimizer beside memory=, as what it keeps counts: give "
                "optimizer=optimizer, its name, or 'none'"
            )
        if isinstance(self.optimizer, str):
            check_optimizer(self.optimizer)

    def check_in_place(self, function: str) -> None:
        """Refuse arguments without one amount, or with a loss: the module stays what it is.

        Raises:
            ArgumentsError, BudgetFormatError: as for `check_amount`, or a loss is given.
        """
        self.check_amount(function)
        if self.loss is not None:
            raise ArgumentsError(
                f"{function} takes no loss=: the model's own forward would return something else. "
                "Use rockmate.Rockmate(model, sample, budget, loss=loss), or return the loss from "
                "forward"
            )

    def terms(self) -> Terms:
        """Return the budget and the settings, without tensors other than the optimizer's."""
        if self.memory is None:
            assert self.budget is not None
            return Terms(self.budget, **self.settings())
        whole = WholeStep(parse_memory(self.memory), self.optimizer, self.reserve)
        return Terms(_PER_CALL, whole_step=whole, **self.settings(reserve=0))


def called_with(
    kind: Callable[P, Given],
) -> Callable[[Callable[[Given], Result]], Callable[P, Result]]:
    """Return a decorator: a function of an object is called with the arguments of its class.

    It may run the user's forward, and what this sets in context variables is none of the caller's.
    """

    def decorate(function: Callable[[Given], Result]) -> Callable[P, Result]:
        make = maker(kind, function.__qualname__.removesuffix(".__init__"))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return contextvars.copy_context().run(function, make(*args, **kwargs))

        return _signed(call, kind)

    return decorate


def method_called_with(
    kind: Callable[P, Given],
) -> Callable[[Callable[[Owner, Given], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Return a decorator: a method of an object is called with the arguments of its class."""

    def decorate(
        function: Callable[[Owner, Given], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        make = maker(kind, function.__qualname__.removesuffix(".__init__"))

        @functools.wraps(function)
        def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return contextvars.copy_context().run(function, self, make(*args, **kwargs))

        return _signed(call, kind, "self")

    return decorate


def maker(kind: Callable[P, Given], name: str) -> Callable[P, Given]:
    """Return what makes the arguments of a function of this name, and refuses unknown ones."""
    signature = inspect.signature(kind)

    def make(*args: P.args, **kwargs: P.kwargs) -> Given:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            near = difflib.get_close_matches(unknown[0], signature.parameters) if unknown else []
            more = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            if unknown and not near:
                more = "; rockmate.Settings has the keywords of all functions"
            raise ArgumentsError(f"{name}() {error}{more}") from None
        return kind(*args, **kwargs)

    return make


def _signed(function: Callable[P, Result], kind: Any, first: str = "") -> Callable[P, Result]:
    """Return a function with the signature of a class, after a `first` parameter."""
    hints = get_type_hints(kind)
    shown = inspect.signature(kind).parameters.values()
    signature = inspect.Signature(
        [
            *([inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)] if first else []),
            *(parameter.replace(annotation=hints[parameter.name]) for parameter in shown),
        ],
        return_annotation=get_type_hints(function)["return"],
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
