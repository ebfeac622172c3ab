"""What operations and nodes cost: time, FLOPs, workspace, and the peaks that follow.

Gets a simplified graph and the module's tensors; gives the facts of each node. Read op_costs.py
(one kind of operation), measure.py and rounds.py (how it is measured), node_facts.py (sums and
exact memory of every node), then recorded_costs.py (costs in a file) and estimated.py (costs
without a run).
"""

from rkgb.costs.estimated import (
    EstimatedCosts,
    estimate_as_recorded,
    estimate_costs,
    plain_peak_bytes,
)
from rkgb.costs.measure import Measured, choose_callees
from rkgb.costs.node_facts import NodeFacts
from rkgb.costs.op_costs import FlopCost, call_kind, made_bytes, op_key
from rkgb.costs.rounds import Timing
from rkgb.costs.scaled import estimate_resized, measure_others, measure_resized
from rkgb.elements.target import OpCost

__all__ = [
    "EstimatedCosts",
    "FlopCost",
    "Measured",
    "NodeFacts",
    "OpCost",
    "Timing",
    "call_kind",
    "choose_callees",
    "estimate_as_recorded",
    "estimate_costs",
    "estimate_resized",
    "made_bytes",
    "measure_others",
    "measure_resized",
    "op_key",
    "plain_peak_bytes",
]
