"""Planned forwards of blocks with collectives inside, as in tensor parallelism.

The collectives of such a block, also those of its recomputation, must run in one order on all
processes. So all processes have the same plan, which they make together. A call of another kind
runs plain. If each process planned it alone, the orders might differ. Processes would then wait for
ever, or add up unrelated tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rockmate.calls.planned_module import PlannedModule
from rockmate.calls.plans_of_module import NotPlannedError


class LockstepModule(PlannedModule):
    """Plans until it is sealed; later calls of other kinds run plain on all processes."""

    plans_alone = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module as it was planned together, or plain."""
        try:
            return super().__call__(args, kwargs)
        except NotPlannedError as other:
            warnings.warn(
                f"this call of a {type(self.model).__name__} spread over processes is not the one "
                f"that was planned ({other}). It runs plain, and may take more memory than the "
                "budget: its processes plan together only in apply_to_blocks.",
                RuntimeWarning,
                stacklevel=3,
            )
            return self.model.forward(*args, **kwargs)
