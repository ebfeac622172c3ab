"""Planned forwards of blocks with collectives inside, as in tensor parallelism.

The collectives of such a block, also those of its recomputation, must run in one order on all
processes. So all processes have the same plan, which they make together. A call of another kind
runs plain. If each process planned it alone, the orders might differ. Processes would then wait for
ever, or add up unrelated tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rockmate.arguments import Call
from rockmate.calls.plan_store import Family, Key
from rockmate.calls.planned_forward import PlannedForward
from rockmate.errors import UnsupportedModuleError
from rockmate.keys.snapshot import Snapshot
from rockmate.networks import Planned


class _NotPlannedError(Exception):
    """A call of a kind that was not planned together."""


class LockstepForward(PlannedForward):
    """Plans until it is sealed; later calls of other kinds run plain on all processes."""

    plans_alone = False
    is_sealed = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module as it was planned together, or plain."""
        try:
            return super().__call__(args, kwargs)
        except _NotPlannedError as other:
            warnings.warn(
                f"this call of a {type(self.model).__name__} spread over processes is not the one "
                f"that was planned ({other}). It runs plain, and may take more memory than the "
                "budget: its processes plan together only in apply_to_blocks.",
                RuntimeWarning,
                stacklevel=3,
            )
            return self.model.forward(*args, **kwargs)

    def _plan(self, key: Key, call: Call) -> Family:
        if self.is_sealed:
            last = self.plans.last_key()
            raise _NotPlannedError("no plan" if last is None else key.unlike(last))
        return super()._plan(key, call)

    def _variant(
        self, family: Family, snapshot: Snapshot, leaves: Sequence[Any], call: Call
    ) -> Planned:
        raise UnsupportedModuleError(
            f"{type(self.model).__name__} is spread over processes and goes another way for other "
            "values of its inputs, which they cannot agree on in a step. Name smaller blocks, or "
            "compute what it looks at outside of them."
        )

    def _with_pieces(
        self,
        planned: Planned,
        external: Mapping[str, Tensor],
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        # No plain run after a failure: it would run collectives that the others do not run.
        return planned.run(self.model, external, leaves, call=(args, kwargs))
