"""The forward of a planned module: it finds the plan for a call, or makes one, and runs it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import OpaquePieceError, OtherWayError, RkgbError
from rkgb.elements import is_running, outermost
from rkgb.module_state import StartOfCall
from rkgb.outside import forget_computed
from rkgb.recording import tensors_of, transparent_checkpoints
from rkgb.torch_api import (
    changing_modes,
    current_dispatch_modes,
    has_global_hooks,
    has_saved_hooks,
    is_abstract,
    is_transforming,
    may_change_saved,
    shares_parametrizations,
)
from rockmate.arguments import Call
from rockmate.calls.loss_outside import LossOutside
from rockmate.calls.plan_store import Family, Key
from rockmate.calls.plans_of_module import HandedOverOtherwiseError, NotPlannedError, PlansOfModule
from rockmate.calls.requester import called_path
from rockmate.calls.second_look import Differences, SecondLook
from rockmate.errors import UnsupportedModuleError
from rockmate.guards.input_signature import ambient, in_order, key_of
from rockmate.guards.sharded import settled_call
from rockmate.guards.snapshot import ExternalValues, Snapshot
from rockmate.networks import Planned
from rockmate.runtime.outputs import tell_of_other_layouts
from rockmate.runtime.plain import is_plain, plain
from rockmate.settings import Terms

_OFTEN = 2  # steps in which a part has returned other values
# Why a step runs plain | what to do instead.
_GLOBAL_HOOKS = (
    "torch.nn.modules.module.register_module_*_hook has set a hook for every module, and a planned "
    "step calls no submodules. | Put the hook on single modules instead."
)
_MODES = (
    "The mode '{}' sees the operations of this step, and may change what they compute; a planned "
    "step runs others, and some twice. | If it only looks at them, let its class say so: "
    "only_watches = True."
)
_SAVED_HOOKS = (
    "Hooks on saved tensors may change their values (compression), and a planned step saves fewer "
    "tensors than the plain one. | Leave the hooks out, since the plan saves memory already."
)
_SHARED = (
    "Calls share what parametrizations compute (torch.nn.utils.parametrize.cached), and a planned "
    "step is one call. | Use `with parametrize.cached()` inside of the forward, or leave it out."
)
_PARTS_AGAIN = (
    "Hooks on saved tensors, such as a checkpoint's, are around a step whose plan runs parts again "
    "that run whole, from the state before the step. | Leave the checkpoint out, since the plan "
    "saves memory already."
)
_MOVED = (
    "Hooks on saved tensors, such as a checkpoint's, are around a step whose plan moves storages "
    "elsewhere, and they would get tensors without memory. | Leave the hooks out, or plan without "
    "offload."
)


class PlannedModule(PlansOfModule):
    """Runs the forward of `model` within a budget; `model` itself is the plain module."""

    forward: Any = None  # a user's replacement of the planned forward
    compiled_call: Any = None  # by `compile()` of the wrapper
    by_blocks: Any = None  # a plan of single blocks
    why = ""  # the reason if it is not planned as a whole
    is_fresh = True  # has not run since it was planned

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        super().__init__(model, settings)
        self.second_look = SecondLook(self)
        self._otherwise = Counter[type]()  # how often parts of a class have returned other values
        self.loss = LossOutside(self)

    def __reduce__(self) -> Any:
        """Leave plans out of copies and files of the plain module, which holds this object."""
        return type(None), ()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module: planned if it trains, plain otherwise."""
        if self.is_fresh:
            self._begin_to_run()
        if self.loss.is_open:
            self.loss.close()
        if not torch.is_grad_enabled() or is_plain() or is_transforming():
            return self.model.forward(*args, **kwargs)
        if why := self._why_plain():
            return self._plainly(why, args, kwargs)
        if self.why:
            return self._run_by_blocks(args, kwargs)
        autocast, flags = ambient()
        numbers = self.watch.numbers(autocast) if self.watch.open else {}
        snapshot = self.watch.now(autocast)
        state = snapshot.state
        if not state.trains and not self.is_part:
            return self.model.forward(*args, **kwargs)
        ordered = {**in_order(kwargs), **numbers}
        leaves, inputs = key_of(args, ordered, self.watch.asked)
        if type(inputs) is not tuple and any(map(is_running, leaves)):
            return self(*settled_call(args, kwargs))
        if type(inputs) is not tuple and any(map(is_abstract, leaves)):
            return self.model.forward(*args, **kwargs)
        if not state.wants and not any(map(wants, leaves)):
            return self.model.forward(*args, **kwargs)
        key = Key(state, inputs, autocast, flags)
        family = self.plans.get(key) or self.plans.for_any_number(key, leaves)
        looks = self.second_look.is_likely or (family is not None and family.looks)
        try:
            if family is None:
                family = self._plan(key, (args, ordered))
                snapshot = self.watch.now(autocast)
            elif self.loss.is_new:
                family = self.loss.renewed(key, family, (args, ordered))
                snapshot = self.watch.now(autocast)
            planned = self._chosen(family.variants[0])
            external = self._values(snapshot, planned).now(tuple(leaves))
            if planned.outcomes.basic.reads:
                found = self._variant(family, snapshot, leaves, (args, ordered))
                planned = self._chosen(found)
                external = self._values(snapshot, planned).now(tuple(leaves))
        except HandedOverOtherwiseError:
            family = None
        if family is None:
            return self(args, kwargs)
        if looks and self.second_look.is_otherwise(
            family, planned, external, leaves, (args, ordered)
        ):
            return self(args, kwargs)
        if planned.is_plain:
            with plain(), transparent_checkpoints():  # as it was measured
                result = self.model.forward(*args, **kwargs)
            name = planned.network.basic.model_name
            tell_of_other_layouts(tensors_of(result), name, planned.budget_bytes)
            return result
        if planned.runs_parts_again and has_saved_hooks():
            return self._plainly(_PARTS_AGAIN, args, kwargs)
        if planned.executor.expected.program.arena_bytes and has_saved_hooks():
            return self._plainly(_MOVED, args, kwargs)
        if self.loss.is_unseen:
            planned = self.loss.cautious(planned, (args, ordered))
        if planned.may_go_another_way:
            result = self._run_or_plain(planned, external, leaves, args, kwargs)
        else:
            result = planned.run(self.model, external, leaves, call=(args, kwargs))
            if self.loss.is_awaited:
                self.loss.follow(result)
        if planned.may_replace:
            self.watch.let_go(snapshot, autocast)
        return result

    def _begin_to_run(self) -> None:
        """Before the first call, forget what functions remember of planning, if it has changed."""
        self.is_fresh = False
        state, states = self.watch.now(ambient()[0]).state, self.plans.states()
        if states and not any(state is known for known in states):
            forget_computed()

    def prepare(self, calls: Sequence[Call]) -> None:
        super().prepare(calls)
        self.loss = LossOutside(self)  # a plan file may tell what it takes

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Differences:
        """Look at a call without running it; without arguments, at the next one before it runs."""
        return self.second_look.check(lambda: self(args, kwargs), args, kwargs)

    def _run_by_blocks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a module that is not planned as a whole."""
        raise NotImplementedError

    def _chosen(self, planned: Planned) -> Planned:
        """Return the plan with room for gradients, where there are some or a loss is not known."""
        if self.loss.is_unseen:
            return planned.accumulating or planned
        return self.for_gradients(planned)

    def _why_plain(self) -> str:
        """Return the reason why no plan can run here now, or ''."""
        if has_global_hooks():
            return _GLOBAL_HOOKS
        if current_dispatch_modes() and (modes := changing_modes()):
            return _MODES.format(modes[-1])
        if shares_parametrizations(self.model):
            return _SHARED
        return _SAVED_HOOKS if may_change_saved() else ""

    def _plainly(self, why: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the plain module, with a warning that says why."""
        reason, _, instead = why.partition(" | ")
        warnings.warn(
            f"{reason} This step runs plain, and may take more memory than the budget. {instead}",
            RuntimeWarning,
            stacklevel=4,
        )
        return self.model.forward(*args, **kwargs)

    def _run_or_plain(
        self,
        planned: Planned,
        external: Mapping[str, Tensor],
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a plan; if the step goes another way than the recorded one, run the plain module.

        Raises:
            NotPlannedError: the step went another way, and a sealed module leaves it to its caller.
        """
        if not self.plans_alone:  # other processes would not join the collectives of a plain run
            return planned.run(self.model, external, leaves, call=(args, kwargs))
        device = planned.signature.device
        known = () if self.is_sealed else (planned.written, planned.writes_buffer)
        start = StartOfCall(self.model, device, *known)
        try:
            return planned.run(self.model, external, leaves, call=(args, kwargs))
        except (OpaquePieceError, OtherWayError) as error:
            if name := start.lost():
                error.add_note(
                    f"The step cannot be run plain instead: it has written to the buffer '{name}', "
                    "which the recorded one did not."
                )
                raise
            start.restore()
            if self.is_sealed:
                raise NotPlannedError(str(error)) from error
            result = self.model.forward(*args, **kwargs)  # or the user's own error
            more = self._run_more_whole(error, planned)
            warnings.warn(
                f"{error} This step runs plain, and may take more memory than the budget.{more}",
                RuntimeWarning,
                stacklevel=4,
            )
            return result

    def _run_more_whole(self, error: RkgbError, planned: Planned) -> str:
        """Run more of the module whole where parts of a class return other values again; say what.

        What follows a part was recorded with its values (numbers of tokens for experts, say). All
        parts of the class go along: each would need a step of its own.
        """
        path = error.module_path if isinstance(error, OpaquePieceError) else None
        if not path or self.is_part or self.settings.strict:
            return ""
        kind = type(self.model.get_submodule(path))
        self._otherwise[kind] += 1
        if self._otherwise[kind] < _OFTEN:
            return ""
        wholes = (call.path for call in planned.network.basic.whole_calls if call.path)
        alike = (p for p in wholes if type(self.model.get_submodule(p)) is kind)
        paths = outermost(called_path(self.model, p.rpartition(".")[0]) for p in alike)
        self.run_whole(paths, f"'{path}' returns other values from call to call")
        named = ", ".join(f"'{p or '(root)'}'" for p in paths)
        return f" What runs whole from now on, for this: {named}."

    def _values(self, snapshot: Snapshot, planned: Planned) -> ExternalValues:
        values = snapshot.values.get(planned.executor)
        if values is None:
            basic = planned.network.basic
            kept = snapshot.kept(planned.executor)
            values = snapshot.values[planned.executor] = ExternalValues(basic, self.model, kept)
        return values

    def _variant(
        self, family: Family, snapshot: Snapshot, leaves: Sequence[Any], call: Call
    ) -> Planned:
        """Return the plan for calls whose inputs lead the forward the same way.

        Raises:
            UnsupportedModuleError: processes would have to agree on the way.
        """
        if not self.plans_alone:
            raise UnsupportedModuleError(
                f"{type(self.model).__name__} is spread over processes and goes another way for "
                "other values of its inputs, which they cannot agree on in a step. Name smaller "
                "blocks, or compute what it looks at outside of them."
            )

        def look_up(planned: Planned) -> Mapping[str, Tensor]:
            return self._values(snapshot, planned).now(tuple(leaves))

        planned = family.fitting(look_up)
        if planned is None:
            planned = self._add_way(family, call)
        return planned


def wants(leaf: Any) -> bool:
    """Return whether a leaf gets a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad
