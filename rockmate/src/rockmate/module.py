"""`Rockmate`: a module like the original, whose training step stays inside a budget."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rkgb.capture import Memo
from rkgb.elements import Ref
from rkgb.torch_api import is_optimized
from rockmate.arguments import Arguments, method_called_with, refuse_no_module
from rockmate.calls.class_attributes import (
    CompiledCallAttribute,
    ForwardAttribute,
    WholeStepAttribute,
)
from rockmate.calls.first_call import INSTEAD
from rockmate.calls.plan_store import PlanRows
from rockmate.calls.second_look import Differences
from rockmate.decisions import DecidingModule
from rockmate.decisions.report import DecidedPlan
from rockmate.errors import UnsupportedModuleError
from rockmate.files.plan_file import PlanFile
from rockmate.guards.module_watch import view_of
from rockmate.guards.sharded import own_class, refuse_engines
from rockmate.networks import Planned, compiled_part, cut_parts
from rockmate.reports.plan_report import PlanReport
from rockmate.requests.identity import in_short, input_texts, made_with
from rockmate.settings import Terms
from rockmate.whole_step.loss import with_loss, without_loss

_log = logging.getLogger("rockmate")
# Attributes of a Rockmate module; an attribute of the model with the same name takes precedence.
_OFFERED = (
    *("plan", "plans", "budget_bytes", "planning_seconds", "eager_peak_bytes"),
    *("measured_peak_bytes", "backward", "original", "save_plan", "plan_file", "check", "memory"),
)


class Rockmate(nn.Module):
    """Wrap `model` so that forward + backward hold at most `budget` above what is resident.

    Outputs, gradients, buffers and the random state equal the original's bit for bit, except for
    kernels whose results differ between two runs of plain PyTorch. The wrapper is also an instance
    of the model's class, and shares everything with the model: parameters, attributes, flags, hooks
    and submodules, whichever of the two they are set on. Without training (eval mode, `no_grad()`),
    the original runs unchanged.

    If something changes between steps (shapes, flags, frozen layers, precision, arguments, layers
    themselves), a call without a plan is planned at once, within the same bytes.

    Further keywords are the fields of `Settings`, which describes them.

    Args:
        model: the module, in train mode, on one device with the sample.
        sample: the first argument, a tuple of arguments, or a dict of keyword arguments.
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
        kwargs: keyword arguments of the sample, beside positional ones.
        samples: more samples to plan for at once. A fraction as budget is one of the largest.
        loss: a function of the outputs, and of targets that calls have behind the model's arguments
            or by name, to be planned with the module: `loss, outputs = rk(x, target)`.

    Examples:
        >>> rk = Rockmate(model, x, "2GiB")
        >>> rk(x).sum().backward()
        >>> rk = Rockmate(model, x, memory="24GB", optimizer=optimizer)
        >>> print(rk.memory)

    Raises:
        InfeasibleBudgetError: no plan fits; `.minimum_bytes` is the smallest budget that does.
        RockmateError, rkgb.RkgbError: the module cannot be run exactly; the text says why. The
            module is not changed.
    """

    _rockmate: DecidingModule
    memory = WholeStepAttribute()

    def __new__(cls, model: nn.Module | None = None, *args: Any, **kwargs: Any) -> Rockmate:
        if model is None:  # a replica, which shares the plans
            return object.__new__(cls)
        if not isinstance(model, nn.Module):
            for (_, base, _), made in classes.items():
                if made is cls:  # the model makes another one of its class, as in rk[:2]: plain
                    return base(model, *args, **kwargs)
        model = plain_of(model)
        return view_of(model, _class_of(cls, type(model), wraps=True))  # type: ignore[return-value]

    @method_called_with(Arguments)
    def __init__(self, given: Arguments) -> None:
        given.check_amount("Rockmate")
        plain = plain_of(given.model)
        if plain is not given.model and not isinstance(given.model, Rockmate):
            _log.info("torch.compile around %s is taken off: %s", type(plain).__name__, INSTEAD)
        planned = DecidingModule(with_loss(plain, given.loss), given.terms())
        planned.prepare(given.calls())
        refuse_no_output(planned)
        object.__setattr__(self, "_rockmate", planned)

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which calls this."""
        raise UnsupportedModuleError(
            "script the plain module: torch.jit.script(rk.original), or rockmate.remove(model) "
            "after apply. The forward of a planned module runs a plan, which is no TorchScript."
        )

    def backward(self) -> None:
        """Do nothing, because `loss.backward()` does everything; a published name."""

    def save_plan(self, path: str | PathLike[str]) -> None:
        """Write the plans to a JSON file, for `Rockmate(..., plan=path)`.

        Example:
            >>> rk.save_plan("gpt2.plan.json")
        """
        self.plan_file().save(path)

    def plan_file(self) -> PlanFile:
        """Return the plans in the form that `save_plan` writes."""
        return self._rockmate.plan_file()

    def check(self, *args: Any, **kwargs: Any) -> Differences:
        """Record a call again, and return its differences from the recording of its plan.

        Each difference is a decision by a value that no guard covers. It is named by module and
        line, and the module is an opaque call from now on. Without arguments, the next call is
        checked before it runs, and differences are logged.

        Example:
            >>> print(rk.check(x))
            module 'blocks.3' (model.py:41): 'mul' took 0.5 when recorded, and takes 0.25 now
        """
        return self._rockmate.check(args, kwargs)

    # ------------------------------------------------------------------ the plan

    @property
    def original(self) -> nn.Module:
        """The plain module: the same parameters and attributes, without plans."""
        return without_loss(self._rockmate.model)

    @property
    def plan(self) -> PlanReport | DecidedPlan:
        """The plan for the sample; printing it shows recomputations and their time."""
        by_blocks = self._rockmate.by_blocks
        if by_blocks is not None:
            return by_blocks.report
        first = self._rockmate.planned
        basic = first.network.basic
        return PlanReport(
            first.problem,
            first.plan,
            first.executor.planned.compiled.source,
            compiled_part(first),
            cut_parts(first),
            pieces=first.network.pieces,
            name=type(self._rockmate.model).__name__,
            seconds=first.seconds,
            measured_peak_bytes=first.measured_peak_bytes,
            is_timed=self._rockmate.settings.cost == "measured",
            made_with=in_short(made_with(basic.device), input_texts(basic)),
        )

    @property
    def _shown(self) -> DecidedPlan | Planned:
        by_blocks = self._rockmate.by_blocks
        return by_blocks.report if by_blocks else self._rockmate.planned

    @property
    def plans(self) -> PlanRows:
        """All plans, with reason and planning time; printing it shows a line for each plan."""
        return self._rockmate.rows()

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; a fraction is resolved."""
        return self._shown.budget_bytes

    @property
    def planning_seconds(self) -> Mapping[str, float]:
        """Seconds that each phase of planning took."""
        return self._shown.seconds

    @property
    def eager_peak_bytes(self) -> int | None:
        """Measured activation peak of the eager module, or None if no eager step was run."""
        return (self._rockmate.by_blocks or self._rockmate.planned).eager_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak that the allocator counted in the self-test, or None without a self-test."""
        return self._shown.measured_peak_bytes

    def extra_repr(self) -> str:
        """Return the model's own text, and the state of planning."""
        first, by_blocks = self._rockmate.first, self._rockmate.by_blocks
        text = "not planned yet"
        if by_blocks is not None:
            text = f"by blocks: {by_blocks.report.summary()}"
        elif first is not None:
            text = (
                f"budget {first.budget_bytes} bytes, predicted peak {first.plan.peak_bytes} "
                f"bytes, overhead {100 * first.plan.overhead:.1f} %"
            )
        return ", ".join(filter(None, (super().extra_repr(), text)))

    def _repr_html_(self) -> str | None:
        """Show the plan in a notebook; None where there is none, and `repr` serves."""
        planned = self._rockmate
        is_planned = planned.first is not None or planned.by_blocks is not None
        return self.plan._repr_html_() if is_planned else None

    # ------------------------------------------------------------------ copies and files

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module; plans hold no tensors and are shared."""
        planned = self._rockmate
        if isinstance(memo, Memo):  # to be recorded, with a block that knows the whole model
            known = memo.get(id(planned.model))
            return _plain_copy(planned.model, planned.model, memo) if known is None else known
        if not is_applied(self):
            is_on_the_way = id(planned.model) in memo  # an attribute of it refers back here
            model = copy.deepcopy(planned.model, memo)
            wrapper = memo.get(id(self))
            if wrapper is None:
                wrapper = _load(model, planned.settings)
            if not is_on_the_way:
                wrapper._rockmate.take_plans_of(planned)
            return wrapper
        made: Any = _plain_copy(planned.model, self, memo)
        dressed(made, DecidingModule(plain_view(made), planned.settings))
        made._rockmate.take_plans_of(planned)
        return made

    def __copy__(self) -> Any:
        """Copy the wrapper, or an applied model without its plans: both share all tensors."""
        if not is_applied(self):
            return _load(self._rockmate.model, self._rockmate.settings)
        model = copy.copy(self._rockmate.model)
        vars(model).pop("_rockmate", None)
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the module and the settings; the first training step after loading plans anew."""
        planned = self._rockmate
        if not is_applied(self):
            return _load, (planned.model, planned.settings)
        reduced = planned.model.__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        function, args, state, *rest = (*reduced, None, None, None)[:5]
        # Pickle refuses to make an object with another class than its own.
        function = _BY_CLASS.get(getattr(function, "__name__", ""), function)
        return function, args, (_without_plans(state), planned.settings), *rest, _restore


# The signature for `help` and editors: the arguments of a wrapper, not of a replica.
Rockmate.__new__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    Rockmate.__init__
)


def _plain_copy(model: nn.Module, of: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module without plans, as `copy` makes it; it is registered as one `of`."""
    parts = list(model.__reduce_ex__(4))
    parts[2:3] = [_without_plans(part) for part in parts[2:3]]
    return copy._reconstruct(of, memo, *parts)  # type: ignore[attr-defined, no-any-return]


# ---------------------------------------------------------------------- classes and views


classes: dict[tuple[Any, Any, bool], Any] = {}


def _class_of(cls: Any, base: Any, *, wraps: bool) -> Any:
    """Return the class of planned modules of class `base`: wrappers, or applied ones."""
    known = classes.get((cls, base, wraps))
    if known is not None:
        return known
    space: dict[str, Any] = {
        "forward": ForwardAttribute(base),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    for name in _OFFERED:
        own = inspect.getattr_static(base, name, None)
        if own is not None:
            space[name] = own
    if wraps:  # its attributes are the model's, so its own are stored elsewhere
        space["__slots__"] = ("_rockmate",)
        space["_compiled_call_impl"] = CompiledCallAttribute()
    kind = type(base)
    made = classes[cls, base, wraps] = kind(base.__name__, (cls, base), space)
    return made


def is_applied(model: nn.Module) -> bool:
    """Return whether a module was planned in place."""
    return isinstance(model, Rockmate) and not hasattr(type(model), "_rockmate")


def plain_view(model: nn.Module) -> nn.Module:
    """Return the plain module of an applied one: another object that shares its state."""
    if isinstance(model, Rockmate):
        return model.original
    return view_of(model, own_class(type(model)))


def plain_of(model: Any) -> nn.Module:
    """Return the module itself, without wrappers of ours or of torch.compile.

    Raises:
        UnsupportedModuleError: it is no module written in Python.
    """
    if is_optimized(model):
        model = model._orig_mod
    if isinstance(model, Rockmate):
        return without_loss(model._rockmate.model)
    plain = refuse_no_module(model)
    whole = "_modules" in vars(model)  # a copy that is being made may be empty
    for path, module in plain.named_modules() if whole else [("", plain)]:
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModuleError(
                f"module '{path or '(root)'}' ({type(module).__name__}) was made by torch.jit, and "
                "runs no Python that could be recorded. Use the module that it was made from."
            )
    if whole:
        refuse_engines(plain)
    return plain


def refuse_no_output(planned: DecidingModule) -> None:
    """Refuse a sample for which the model returns no tensor for a loss.

    Raises:
        UnsupportedModuleError: its forward returns no tensor, and leaves none behind.
    """
    if planned.first is None:
        return
    basic = planned.first.network.basic
    if basic.roots or basic.effects or any(isinstance(out, Ref) for out in basic.outputs):
        return
    kind = type(planned.model)
    code = getattr(kind.forward, "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    raise UnsupportedModuleError(
        f"let {kind.__name__}.forward{where} return the output or the loss: for this sample it "
        "returns no tensor, so there is nothing to train by."
    )


def dressed(model: nn.Module, planned: DecidingModule) -> nn.Module:
    """Replace the forward of a module by a planned one, and return the module."""
    vars(model)["_rockmate"] = planned
    object.__setattr__(model, "__class__", _class_of(Rockmate, type(model), wraps=False))
    return model


def _without_plans(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name != "_rockmate"}


def _load(model: nn.Module, settings: Terms) -> Rockmate:
    wrapper = Rockmate.__new__(Rockmate, model)
    object.__setattr__(wrapper, "_rockmate", DecidingModule(model, settings))
    return wrapper


def _new(kind: Any, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _new_ex(kind: Any, args: Any, kwargs: Any) -> Any:
    return kind.__new__(kind, *args, **kwargs)


_BY_CLASS = {"__newobj__": _new, "__newobj_ex__": _new_ex}  # as copyreg calls them


def _restore(model: nn.Module, saved: tuple[Any, Terms]) -> None:
    state, settings = saved
    if state is not None:
        set_state = getattr(model, "__setstate__", None) or vars(model).update
        set_state(state)
    dressed(model, DecidingModule(plain_view(model), settings))
