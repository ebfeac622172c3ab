"""The source of an estimate's times: FLOPs, or costs that were recorded elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from rkgb import RecordedCosts
from rkgb.costs import (
    EstimatedCosts,
    FlopCost,
    OpCost,
    estimate_as_recorded,
    estimate_costs,
    estimate_resized,
)
from rkgb.elements import Op, TensorInfo
from rkgb.graphs import BasicGraph
from rockmate.errors import PlanMismatchError, UnknownChoiceError
from rockmate.files.plan_file import PlanFile, load_text
from rockmate.requests.identity import kind_digest

_MOST_MISSING = 0.1  # of the work of a step
Cost = str | PathLike[str] | FlopCost | RecordedCosts | PlanFile


@dataclass(frozen=True)
class ByFlops:
    """FLOPs and bytes, with the weights of a device that need not be here."""

    source: FlopCost = field(default_factory=FlopCost)
    words = "FLOPs"

    def of(self, basic: BasicGraph, ops: Sequence[Op], _: BasicGraph) -> EstimatedCosts:
        """Return what each kind among `ops` costs."""
        return estimate_costs(basic, ops, self.source)


@dataclass(frozen=True)
class Recorded:
    """Costs of another run: a description, and a look-up by the key of a kind of operation."""

    words: str
    find: Callable[[str], OpCost | None]

    def of(self, basic: BasicGraph, ops: Sequence[Op], recording: BasicGraph) -> EstimatedCosts:
        """Return what each kind among `ops` costs; `recording` is the step they come from.

        Raises:
            PlanMismatchError: operations without a known cost do more than a tenth of the work.
        """
        found = estimate_as_recorded(basic, ops, self.find, recording)
        _refuse_others(found, self.words)
        return found


@dataclass(frozen=True)
class InProportion:
    """Known costs of a step, for the same step at other sizes."""

    words: str
    known: EstimatedCosts
    known_ops: Sequence[Op]
    known_infos: Mapping[str, TensorInfo]

    def of(self, basic: BasicGraph, ops: Sequence[Op], _: BasicGraph) -> EstimatedCosts:
        """Return what each kind among `ops` costs, in proportion.

        Raises:
            PlanMismatchError: operations without a known cost do more than a tenth of the work.
        """
        found = estimate_resized(basic, ops, self.known, self.known_ops, self.known_infos)
        _refuse_others(found, self.words)
        return found


Costs = ByFlops | Recorded | InProportion


def _refuse_others(estimated: EstimatedCosts, words: str) -> None:
    """Refuse a step for which too many costs are missing; the error's `differences` name them."""
    missing = estimated.missing
    if estimated.missing_share > _MOST_MISSING:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise PlanMismatchError(
            f"the costs ({words}) have none for {', '.join(missing[:3])}{more}: they are "
            "of another network, shape or device. Record costs of this call, or estimate with "
            "cost='flops'",
            missing,
        )


def _of_plans(file: PlanFile) -> Recorded:
    costs = {digest: cost for saved in file.plans for digest, cost in saved.costs.items()}

    def find(key: str) -> OpCost | None:
        cost = costs.get(kind_digest(key))
        return None if cost is None else OpCost(cost.time_ms, cost.flops, cost.workspace_bytes)

    return Recorded(_told(file.made_with.get("device"), file.made_with.get("torch")), find)


def costs_named(cost: Cost) -> Recorded | ByFlops:
    """Return the costs that `cost` names.

    Raises:
        UnknownChoiceError: it is neither "flops" nor the path of a file.
        PlanFileError: the file is damaged.
        rkgb.InvalidGraphError: the file holds neither costs nor plans.
    """
    if cost == "flops":
        return ByFlops()
    if isinstance(cost, FlopCost):
        return ByFlops(cost)
    if isinstance(cost, (str, PathLike)):
        cost = _read(Path(cost))
    if isinstance(cost, PlanFile):
        return _of_plans(cost)
    if isinstance(cost, RecordedCosts):
        return Recorded(_told(cost.device, cost.torch_version), cost.find)
    raise _unknown(cost)


def _told(device: object, version: object) -> str:
    return f"milliseconds recorded on {device} with torch {version}"


def _read(path: Path) -> PlanFile | RecordedCosts:
    if not path.exists():
        raise _unknown(str(path))
    text = load_text(path)
    try:
        is_of_plans = "rockmate_plans" in json.loads(text)
    except (ValueError, TypeError, RecursionError):
        is_of_plans = False
    return PlanFile.from_json(text) if is_of_plans else RecordedCosts.from_json(text)


def _unknown(asked: object) -> UnknownChoiceError:
    return UnknownChoiceError(
        *("cost", asked, ["flops"]),
        "an rkgb.FlopCost, or a file that rk.save_plan or rkgb's RecordedCosts.save wrote",
    )
