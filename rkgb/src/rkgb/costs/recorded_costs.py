"""Costs in a file: measured on one machine, used as a cost source on another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rkgb.device.chosen import device_of
from rkgb.elements.target import OpCost
from rkgb.errors import InvalidGraphError

FORMAT = "rkgb costs 2"


@dataclass(frozen=True)
class RecordedCosts:
    """Time and temporary memory of every kind of operation, as a source for `cost=`.

    A kind is identified by its kernel, attributes, shapes, types and strides.
    """

    costs: Mapping[str, OpCost]
    device: str  # where they were measured, in words
    torch_version: str

    def __repr__(self) -> str:
        return f"<costs of {len(self.costs)} kinds of operation on {self.device}>"

    @classmethod
    def of(cls, costs: Mapping[str, OpCost], device: str) -> RecordedCosts:
        """Return the costs of kinds of operation that were found on a device."""
        found = {_digest(key): cost for key, cost in costs.items()}
        return cls(found, device_of(device).name, torch.__version__)

    def find(self, key: str) -> OpCost | None:
        """Return the cost of the kind with this key, or None."""
        return self.costs.get(_digest(key))

    def lookup(self, key: str, where: str) -> OpCost:
        """Return the cost of the kind with this key; `where` names it in the error.

        Raises:
            InvalidGraphError: the recording has no such kind.
        """
        found = self.find(key)
        if found is None:
            raise InvalidGraphError(
                f"the recorded costs ({len(self.costs)} kinds of operation, {self.device}, torch "
                f"{self.torch_version}) have none for {where}. Record them again with this model, "
                "this sample and this version of rkgb, or choose another cost, such as 'flops'."
            )
        return found

    def to_json(self) -> str:
        """Return the costs as JSON text."""
        rows = {key: asdict(cost) for key, cost in self.costs.items()}
        head = {"format": FORMAT, "device": self.device, "torch": self.torch_version}
        return json.dumps({**head, "costs": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RecordedCosts:
        """Read what `to_json` wrote.

        Raises:
            InvalidGraphError: the text is no recording of costs.
        """
        try:
            rows = json.loads(text)
            if not isinstance(rows, dict) or rows.get("format") != FORMAT:
                raise ValueError(f"its format is not '{FORMAT}'")
            costs = {key: OpCost(**row) for key, row in rows["costs"].items()}
            return cls(costs, rows["device"], rows["torch"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidGraphError(f"this is no recording of costs: {error}.") from None

    def save(self, path: str | Path) -> None:
        """Write the costs into a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecordedCosts:
        """Read a file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _digest(key: str) -> str:
    return hashlib.sha1(key.encode()).hexdigest()
