"""Costs in a file: measured on one machine, used as a cost source on another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rkgb.anonymize import node_key
from rkgb.errors import InvalidGraphError
from rkgb.inspect_op import Cost, Inspection
from rkgb.simplified import SimplifiedGraph

FORMAT = "rkgb costs 1"


@dataclass(frozen=True)
class RecordedCosts:
    """Time and temporary memory of every kind of node of one graph; `cost=` takes it as source.

    A node is found again by what it computes: operations, attributes, shapes, types and strides.
    """

    costs: Mapping[str, tuple[Cost, int, int]]  # forward and backward overhead in bytes
    device: str  # where they were measured, in words
    torch_version: str

    @classmethod
    def of(cls, sg: SimplifiedGraph, inspection: Inspection) -> RecordedCosts:
        """Return the costs that an inspection of `sg` found."""
        costs: dict[str, tuple[Cost, int, int]] = {}
        for node, fact in zip(sg.nodes, inspection.facts, strict=True):
            overheads = (fact.fwd_overhead_bytes, fact.bwd_overhead_bytes)
            costs.setdefault(_digest(node_key(sg, node)), (fact.cost, *overheads))
        device = inspection.runner.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(costs, name, torch.__version__)

    def lookup(self, key: str, where: str) -> tuple[Cost, int, int]:
        """Return the cost of the node with this key; `where` names it in the error.

        Raises:
            InvalidGraphError: the recording has no such node.
        """
        found = self.costs.get(_digest(key))
        if found is None:
            raise InvalidGraphError(
                f"the recorded costs ({len(self.costs)} kinds of node, {self.device}, torch "
                f"{self.torch_version}) have none for {where}. Record them again with this model, "
                "this sample and this version of rkgb, or choose cost='measured' or 'flops'."
            )
        return found

    def to_json(self) -> str:
        """Return the costs as JSON text."""
        rows = {
            key: {"cost": asdict(cost), "fwd_overhead_bytes": fwd, "bwd_overhead_bytes": bwd}
            for key, (cost, fwd, bwd) in self.costs.items()
        }
        head = {"format": FORMAT, "device": self.device, "torch": self.torch_version}
        return json.dumps({**head, "costs": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RecordedCosts:
        """Read what `to_json` wrote.

        Raises:
            InvalidGraphError: the text is something else.
        """
        rows = json.loads(text)
        if not isinstance(rows, dict) or rows.get("format") != FORMAT:
            raise InvalidGraphError(f"this is no recording of costs: expected format '{FORMAT}'.")
        costs = {
            key: (Cost(**row["cost"]), row["fwd_overhead_bytes"], row["bwd_overhead_bytes"])
            for key, row in rows["costs"].items()
        }
        return cls(costs, rows["device"], rows["torch"])

    def save(self, path: str | Path) -> None:
        """Write the costs into a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecordedCosts:
        """Read a file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _digest(key: str) -> str:
    return hashlib.sha1(key.encode()).hexdigest()
