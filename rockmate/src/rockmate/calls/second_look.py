"""A second recording of some calls, before their plans run them.

The calls after the recorded one are looked at, and those that the user asks for. A difference from
the plan's recording means that Python has decided by something that no guard covers. Then the
submodule around the difference runs whole from then on, and the call is planned anew before it
runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkgb.capture import look_again
from rkgb.costs import made_bytes, op_key
from rkgb.device import no_collection
from rkgb.elements import Op, TensorInfo, outermost, target_of
from rkgb.engine import Sample
from rkgb.graphs import Difference, ambient_autocast
from rkgb.torch_api import current_dispatch_modes, has_saved_hooks
from rockmate.arguments import Call
from rockmate.calls.plan_store import Family
from rockmate.calls.plans_of_module import PlansOfModule
from rockmate.calls.requester import called_path, planning
from rockmate.errors import RockmateError
from rockmate.guards.module_watch import without_hooks
from rockmate.networks import Planned
from rockmate.networks.network import Network
from rockmate.runtime.plain import unseen

_log = logging.getLogger("rockmate")
_MOST_NAMED = 3  # differences, in the log
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


class Differences(tuple[Difference, ...]):
    """Differences of a call from its plan's recording; printed, they are a line each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing differs from the recording"

    __repr__ = __str__


class _LookedAtError(Exception):
    """A call was looked at, and does not run."""

    def __init__(self, found: Differences) -> None:
        super().__init__(found)
        self.found = found


class SecondLook:
    """Records some calls of a module again, before their plans run them."""

    def __init__(self, plans: PlansOfModule) -> None:
        self.plans = plans
        self.is_asked = False  # for a look at the next call
        self.is_likely = bool(plans.settings.check_every)
        self._calls, self._stops = 0, False

    def check(
        self, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Differences:
        """Look at the call that `run` makes, without running it; by default the next one.

        Raises:
            RockmateError: no plan is for the call.
        """
        self.is_likely = True
        if not args and not kwargs:
            self.is_asked = True
            return Differences()
        self._stops = True
        try:
            with torch.enable_grad():
                run()
        except _LookedAtError as look:
            return look.found
        finally:
            self._stops, self.is_likely = False, bool(self.plans.settings.check_every)
        raise RockmateError(
            "this call is run by the plain module (in eval mode, nothing requires a gradient, or a "
            "transform of torch.func is around it), so that no plan can be compared with it."
        )

    def is_otherwise(
        self,
        family: Family,
        planned: Planned,
        external: Mapping[str, Tensor],
        leaves: Sequence[Any],
        call: Call,
    ) -> bool:
        """Return whether a look at this call, if one is due, finds that it needs another plan."""
        if self._stops:
            raise _LookedAtError(self.look(planned, external, leaves, call))
        return self._is_due(family) and bool(self.look(planned, external, leaves, call))

    def look(
        self, planned: Planned, external: Mapping[str, Tensor], leaves: Sequence[Any], call: Call
    ) -> Differences:
        """Return the differences of a call from its plan; if there are any, the plan is dropped.

        Raises:
            UnsupportedModuleError: something differs, and no part may run whole (`strict=True`).
        """
        found = self._recorded_again(planned, external, leaves, call)
        if found is None and self._stops:
            raise RockmateError(
                f"a call of {type(self.plans.model).__name__} cannot be recorded once more here, "
                "so that nothing can be compared: its values are looked at, its processes run "
                "collectives, it is in a region of autocast, or it takes too much memory."
            )
        if not found:
            return Differences()
        model = self.plans.model
        paths = outermost(called_path(model, difference.module_path) for difference in found)
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        _log.warning(
            "%s was recorded otherwise than it is called now, though nothing differs that a plan "
            "knows of: %s%s. What runs whole from now on: %s. Pass what decides this as an "
            "argument, or keep it as an attribute of the module",
            type(model).__name__,
            "; ".join(map(str, found[:_MOST_NAMED])),
            more,
            ", ".join(f"'{path or '(root)'}'" for path in paths),
        )
        self.plans.run_whole(paths, str(found[0]))
        return Differences(found)

    def _is_due(self, family: Family) -> bool:
        if self.plans.settings.check_every:
            self._calls += 1
        often = self.plans.settings.check_every
        is_due = family.looks > 0 or self.is_asked or bool(often and self._calls % often == 0)
        # A mode that watches the operations of this call must not see those of a look.
        if not is_due or current_dispatch_modes() or has_saved_hooks():
            return False
        family.looks = max(0, family.looks - 1)
        self.is_asked, self.is_likely = False, bool(often)
        family.variants[0].executor.look_at(self.plans.model)
        return True

    def _recorded_again(
        self, planned: Planned, external: Mapping[str, Tensor], leaves: Sequence[Any], call: Call
    ) -> list[Difference] | None:
        basic = planned.network.basic
        basic = replace(basic, constants={name: external[name] for name in basic.constants})
        spaces = {getattr(op.target, "namespace", "") for op in basic.ops}
        if not self.plans.plans_alone or not spaces.isdisjoint(_COLLECTIVES):
            return None  # other processes may not look now
        # A region of autocast keeps casts of earlier code. A look would use them, and find
        # differences that nobody has decided.
        if ambient_autocast() is not None:
            return None
        numbers = () if planned.numbers is None else planned.numbers.of(leaves) or ()
        bare = without_hooks(self.plans.model, type(self.plans.model))
        with planning(), unseen(), no_collection():
            sample = Sample.of(bare, *call)
            within = _needs_bytes(planned.network), planned.budget_bytes
            return look_again(bare, sample, basic, numbers, within=within)


def _needs_bytes(network: Network) -> list[int]:
    """Return the bytes that each operation of a step makes, with its workspace."""
    basic, costs = network.basic, network.measured.costs
    most = max((cost.workspace_bytes for cost in costs.values()), default=0)
    needs: list[int] = []
    for op in (*basic.ops, *basic.backward):
        if target_of(op).runs_python:  # stand-ins replace its results
            needs.append(sum(basic.infos[name].size_bytes for name in op.results if name))
            continue
        cost = costs.get(op_key(op, basic.infos))
        made = made_bytes(op, basic.infos) + _overwriting_bytes(op, basic.infos)
        needs.append(made + (most if cost is None else cost.workspace_bytes))
    return needs


def _overwriting_bytes(op: Op, infos: Mapping[str, TensorInfo]) -> int:
    """Return the bytes of results that a planned backward writes over their argument instead."""
    returns = getattr(getattr(op.target, "_schema", None), "returns", ())
    if not returns or any(result.alias_info is not None for result in returns):
        return 0
    return sum(
        infos[name].size_bytes for name in op.results if name and infos[name].alias_of != name
    )
