"""Measure a graph and gather the facts of its nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rkgb.atlas.anonymize import equivalence_classes, node_key
from rkgb.costs.measure import measure
from rkgb.costs.node_facts import NodeFacts, node_facts
from rkgb.costs.op_costs import kinds_of, named
from rkgb.costs.recorded_costs import RecordedCosts
from rkgb.elements.sample import Sample
from rkgb.elements.target import OpCost
from rkgb.graphs.basic import external_values
from rkgb.graphs.simplified import SimplifiedGraph, operations

CostChoice = Literal["measured", "flops"] | RecordedCosts


@dataclass(frozen=True)
class Inspection:
    """The facts of every node, and the costs of kinds of operation from which they follow."""

    facts: tuple[NodeFacts, ...]
    costs: Mapping[str, OpCost]
    classes: tuple[tuple[int, ...], ...]  # equal nodes
    device: str
    seconds: float

    def __repr__(self) -> str:
        return f"<costs of {len(self.facts)} nodes on {self.device}>"


def inspect_model(
    sg: SimplifiedGraph,
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    cost: CostChoice = "measured",
) -> Inspection:
    """Return the cost of every kind of operation of `sg`, and the facts of its nodes.

    `inputs` is the sample that the model was recorded with. The default is random values of the
    recorded shapes (zeros for integers, which are valid indices).

    Raises:
        ValueError: `cost` is unknown.
    """
    began = time.perf_counter()
    basic, ops = sg.basic, operations(sg)
    costs: Mapping[str, OpCost]
    if isinstance(cost, RecordedCosts):
        costs = {key: cost.lookup(key, named(op)) for key, op in kinds_of(basic, ops).items()}
    elif cost not in ("measured", "flops"):
        raise ValueError(
            f"cost is {cost!r}; choose 'measured', 'flops', or RecordedCosts.load(path)."
        )
    else:
        leaves: tuple[Any, ...] = (None,) * len(basic.inputs)
        if inputs is not None or kwargs is not None:
            leaves = Sample.of(model, inputs, kwargs).leaves
        external = external_values(basic, model, leaves)
        known = {name: tensor for name, tensor in external.items() if tensor is not None}
        measured = measure(basic, ops, known, times=cost == "measured")
        costs = (measured if cost == "measured" else measured.by_flops(basic, ops)).costs
    keys = [node_key(sg, node) for node in sg.nodes]
    return Inspection(
        facts=node_facts(sg, costs),
        costs=costs,
        classes=tuple(map(tuple, equivalence_classes(keys))),
        device=str(basic.device if device is None else device),
        seconds=time.perf_counter() - began,
    )
