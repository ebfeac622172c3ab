"""The forward of a planned module, which is planned as a whole or by its blocks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb import RkgbError
from rkgb.elements import flatten, is_running
from rkgb.engine import Sample, record
from rkgb.errors import without_advice
from rkgb.torch_api import is_abstract, without_global_hooks, without_saved_hooks
from rockmate.arguments import Call
from rockmate.calls.loss_outside import is_worth_a_plan, tell_no_room
from rockmate.calls.plan_store import PlanRow, PlanRows
from rockmate.calls.planned_module import PlannedModule, wants
from rockmate.calls.plans_of_module import HandedOverOtherwiseError
from rockmate.calls.requester import planning
from rockmate.decisions.choosing import ChosenStep, NoBlocksError, plan_step
from rockmate.decisions.report import DecidedPlan, no_file
from rockmate.errors import InfeasibleBudgetError, RockmateError
from rockmate.files.plan_file import PlanFile
from rockmate.guards.input_signature import ambient, in_order
from rockmate.guards.module_watch import without_hooks
from rockmate.guards.sharded import settled_call
from rockmate.networks import Planned, has_sparse_gradients
from rockmate.runtime.plain import unseen
from rockmate.settings import Terms
from rockmate.whole_step.memory import Memory

_log = logging.getLogger("rockmate")


class _ByBlocksError(HandedOverOtherwiseError):
    """From now on the module is planned by blocks."""


class DecidingModule(PlannedModule):
    """Runs a module by a plan of the whole if one fits, or else by its blocks."""

    losses = True  # it is the trained module: only its losses get gradients

    def __init__(self, model: nn.Module, settings: Terms) -> None:
        super().__init__(model, settings)
        self.whole: tuple[str, ...] = ()  # submodules that cannot be recorded
        self.may_be_plain = False  # where it has no blocks: it cannot run whole either
        self.steps = OrderedDict[Hashable, ChosenStep]()  # by kind of call
        self._before_loss = set[Hashable]()  # kinds planned before a loss outside was seen

    def _run_by_blocks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not any(module.training for module in self.model.modules()):
            return self.model.forward(*args, **kwargs)
        leaves = flatten((args, dict(kwargs)))[0]
        if any(map(is_running, leaves)):
            return self(*settled_call(args, kwargs))
        wanting = (*leaves, *self.model.parameters())
        if any(map(is_abstract, leaves)) or not any(map(wants, wanting)):
            return self.model.forward(*args, **kwargs)
        try:
            chosen = self._step_for((args, kwargs))
        except (RockmateError, RkgbError):
            raise
        except Exception:  # the user's own: the plain forward raises it, after what it changes
            self.model.forward(*args, **kwargs)
            raise
        result = chosen.step.run(self.model, args, kwargs)
        if self.loss.is_awaited:
            self.loss.follow(result)
        return result

    # ------------------------------------------------------------------ planning

    def _prepare(self, calls: Sequence[Call]) -> None:
        if not self.why:
            try:
                return super()._prepare(calls)
            except _ByBlocksError:
                pass
        for args, kwargs in calls:
            self._step_for((args, kwargs))
        return None

    def _planned(self, call: Call, why: str, **options: Any) -> Planned:
        settings, memory = self.for_call(call)
        with _told(memory):
            planned = self._whole_or_by_blocks(call, why, settings=settings, **options)
        coming = None if memory is None else memory.coming
        if memory is None or coming is None or not planned.plan.overhead_ms:
            return planned
        budget = memory.budget_bytes + coming.size_bytes
        terms = replace(settings, budget=budget, coming=coming)
        return self._using_room_to_come(planned, call, why, terms, options)

    def _using_room_to_come(
        self, planned: Planned, call: Call, why: str, settings: Terms, options: Mapping[str, Any]
    ) -> Planned:
        """Return a plan that uses the memory of gradients until they exist, if it saves time."""
        stay = settings.coming.gradients
        if settings.compile or (stay and has_sparse_gradients(planned.network.graph)):
            return planned
        try:
            found = super()._planned(call, why, settings=settings, **options)
        except (RockmateError, RkgbError) as error:
            _log.debug("the memory of gradients is not used before they exist: %s", error)
            return planned
        if found.plan.overhead_ms >= planned.plan.overhead_ms:
            return planned
        found = replace(found, accumulating=planned)
        if self.first is planned:
            self.first = found
        return found

    def _whole_or_by_blocks(self, call: Call, why: str, **options: Any) -> Planned:
        try:
            return super()._planned(call, why, **options)
        except InfeasibleBudgetError as error:
            whole = getattr(error, "whole", ())
            if not whole or self.settings.strict or self.settings.compile:
                raise
            args, kwargs = self.as_called(call)
            self.whole = tuple(whole)
            settings = options["settings"]  # a fraction is one of the plain step here
            reason = self._reason(args, kwargs)
            try:
                chosen = self._plan_step((args, kwargs), reason, settings)
            except NoBlocksError as none:
                error.add_note(str(none))
                raise error from None
            except InfeasibleBudgetError as other:
                raise (other if other.minimum_bytes < error.minimum_bytes else error) from None
            self._run_blocks_within(chosen, reason)
        except RkgbError as error:
            self._plan_apart(error, call, options["settings"])
        raise _ByBlocksError

    def _plan_apart(self, error: RkgbError, call: Call, settings: Terms) -> None:
        """Plan the blocks of a root that can neither be recorded nor run whole, if it has any.

        Raises:
            RkgbError: the refusal of the root, where no block can save anything.
        """
        if not error.apart or self.settings.strict or self.settings.compile:
            raise error
        self.whole, reason = error.apart, without_advice(str(error))
        try:
            self.may_be_plain = True
            chosen = self._plan_step(self.as_called(call), reason, settings)
        except NoBlocksError:
            self.may_be_plain = False
            raise error from None
        self._run_blocks_within(chosen, reason)

    def _run_blocks_within(self, chosen: ChosenStep, reason: str) -> None:
        """Plan other calls by blocks, too, within the bytes of the first."""
        self.settings = replace(self.settings, budget=chosen.report.budget_bytes)
        self.why = reason

    def _reason(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why the module is not recorded as a whole."""
        bare = without_hooks(self.model, type(self.model))
        try:
            with unseen():
                record(bare, Sample.of(bare, tuple(args), kwargs), guards=False)
        except RkgbError as error:
            return without_advice(str(error))  # the advice is followed here
        return "parts of it are run whole: " + ", ".join(f"'{path}'" for path in self.whole) + "."

    def _step_for(self, call: Call) -> ChosenStep:
        key = _kind_of(self.model, call)
        known = self.steps.get(key)
        if known is not None and known.step.holds(self.model):
            self.steps.move_to_end(key)
            if key in self._before_loss and self.settings.whole_step.seen is not None:
                self._before_loss.discard(key)
                return self._renewed(call, known)
            return known
        settings, memory = self.for_call(call)
        with _told(memory):
            return self._plan_step(call, self.why, settings)

    def _renewed(self, call: Call, known: ChosenStep) -> ChosenStep:
        """Return the plan of blocks for a loss that was seen: another one, if that is better."""
        settings, memory = self.for_call(call)
        assert memory is not None
        assert isinstance(settings.budget, int)
        more_bytes = settings.budget - known.report.budget_bytes
        is_over = known.report.measured_peak_bytes > settings.budget
        if not is_over and not (known.report.overhead and is_worth_a_plan(more_bytes, memory)):
            return known
        try:
            with _told(memory):
                return self._plan_step(call, self.why, settings)
        except InfeasibleBudgetError as error:
            tell_no_room(self.model, error)
            return known

    def _plan_step(self, call: Call, why: str, settings: Terms) -> ChosenStep:
        """Plan the blocks for a kind of call."""
        with (
            planning(),
            torch.inference_mode(False),
            torch.enable_grad(),
            without_saved_hooks(),
            without_global_hooks(),
        ):
            began = time.perf_counter()
            args, kwargs = call
            given = self.model, (tuple(args), kwargs), settings, self.whole, why
            chosen = plan_step(*given, may_be_plain=self.may_be_plain)
            seconds = {"blocks": time.perf_counter() - began}
            chosen = replace(chosen, report=replace(chosen.report, seconds=seconds))
            key, whole = _kind_of(self.model, call), self.settings.whole_step
            self.steps[key] = chosen
            if whole is not None and whole.seen is None:
                self._before_loss.add(key)
            while len(self.steps) > max(1, self.settings.max_plans):
                self.steps.popitem(last=False)
            _log.info("planned by blocks: %s", chosen.report.summary())
            return chosen

    # ------------------------------------------------------------------ what was planned

    @property
    def by_blocks(self) -> ChosenStep | None:
        """The plan by blocks for the sample, if there is one."""
        return next(iter(self.steps.values()), None) if self.why else None

    def rows(self) -> PlanRows:
        """Return the plans by kind of call."""
        rows = [_row(key, chosen.report) for key, chosen in self.steps.items()]
        return PlanRows([*self.plans.rows(), *rows])

    def plan_file(self) -> PlanFile:
        if self.why:
            raise no_file(type(self.model).__name__)
        return super().plan_file()


@contextlib.contextmanager
def _told(memory: Memory | None) -> Iterator[None]:
    """Add the table of a step's memory to errors about a budget that is too small."""
    try:
        yield
    except InfeasibleBudgetError as error:
        if memory is None:
            raise
        raise memory.refusal(error) from error


def _row(key: Hashable, plan: DecidedPlan) -> PlanRow:
    seconds = sum(plan.seconds.values())
    why = "it decides by values"
    return PlanRow(
        "blocks", why, "planned", seconds, plan.peak_bytes, plan.budget_bytes, plan.overhead
    )


def _kind_of(model: nn.Module, call: Call) -> Hashable:
    """Return the kind of a call for plans by blocks: sizes, what trains, and torch's state.

    Numbers and attributes, which such a root may change at every step, are for the blocks to see.
    """
    args, kwargs = call
    leaves, structure = flatten((tuple(args), in_order(kwargs)))
    kinds = tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else _worth(leaf)
        for leaf in leaves
    )
    modes = tuple(module.training for module in model.modules())
    weights = tuple((p.requires_grad, p.dtype) for p in model.parameters())
    return structure, kinds, modes, weights, ambient()


def _worth(leaf: Any) -> Hashable:
    return leaf if leaf is None or isinstance(leaf, (bool, str)) else type(leaf).__qualname__
