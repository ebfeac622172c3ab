"""The published entry points: every graph of a module in one call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rkgb.atlas.anonymize import AnonymousGraph, anonymize, equivalence_classes
from rkgb.atlas.forward_backward import KGraph, k_graph
from rkgb.atlas.inspection import CostChoice, Inspection, inspect_model
from rkgb.atlas.serialize import FORMAT, decode, encode
from rkgb.capture.record import record
from rkgb.costs.node_facts import node_facts
from rkgb.costs.recorded_costs import RecordedCosts
from rkgb.elements.sample import Sample
from rkgb.elements.target import OpCost
from rkgb.errors import InvalidGraphError
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import B_to_D, DataFlowGraph, Drawn
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, cut


@dataclass(frozen=True)
class RkgbResult(Drawn):
    """Every graph of one module on one sample."""

    B_graph: BasicGraph
    D_graph: DataFlowGraph
    S_graph: SimplifiedGraph
    K_graph: KGraph
    S_graph_list: tuple[SimplifiedGraph, ...]  # the blocks between articulation points
    K_graph_list: tuple[KGraph, ...]
    equivalent_classes: tuple[tuple[int, ...], ...]  # equal blocks, by position
    list_ano_S: tuple[AnonymousGraph, ...]
    inspection: Inspection

    def __repr__(self) -> str:
        blocks = len(self.S_graph_list)
        return (
            f"<graphs of {self.B_graph.model_name}: {len(self.B_graph.ops)} operations, "
            f"{blocks} block{'s' * (blocks != 1)}>"
        )

    @property
    def costs(self) -> RecordedCosts:
        """The cost of each kind of operation, which can be saved and used as `cost=` elsewhere."""
        return RecordedCosts.of(self.inspection.costs, self.inspection.device)

    def save(self, path: str | Path) -> None:
        """Write the graphs and their costs into a JSON file.

        Raises:
            InvalidGraphError: an operation has no registered name.
        """
        inspection = self.inspection
        rows = {
            "format": FORMAT,
            "graph": encode(self.B_graph),
            "device": inspection.device,
            "costs": {key: asdict(cost) for key, cost in inspection.costs.items()},
            "classes": inspection.classes,
            "seconds": inspection.seconds,
        }
        Path(path).write_text(json.dumps(rows), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RkgbResult:
        """Read a file that `save` wrote; neither the model nor its device is needed.

        Raises:
            InvalidGraphError: the file is no such file, or has operators that are unknown here.
        """
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(rows, dict) or rows.get("format") != FORMAT:
            raise InvalidGraphError(f"'{path}' is no file of graphs: expected format '{FORMAT}'.")
        sg = D_to_S(B_to_D(decode(rows["graph"])))
        costs = {key: OpCost(**row) for key, row in rows["costs"].items()}
        classes = tuple(map(tuple, rows["classes"]))
        facts = node_facts(sg, costs)
        return _assemble(sg, Inspection(facts, costs, classes, rows["device"], rows["seconds"]))

    def __str__(self) -> str:
        return (
            f"{self.B_graph.model_name}: {len(self.B_graph.ops)} operations, "
            f"{len(self.S_graph.nodes)} nodes, {len(self.S_graph_list)} blocks of "
            f"{len(self.equivalent_classes)} classes, {len(self.inspection.classes)} kinds of node"
        )


def make_all_graphs(
    model: nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    cost: CostChoice = "measured",
) -> RkgbResult:
    """Return every graph of `model` on `sample`: a tensor, a tuple of arguments, or a dict.

    The model is captured in its present mode (train or eval) and not changed. `cost` is the source
    of times: "measured" now, "flops" (deterministic), or `RecordedCosts` of another run.

        >>> result = make_all_graphs(model, torch.randn(8, 16))
        >>> print(result)                                # how many operations, nodes and blocks
        Sequential: 4 operations, 4 nodes, 4 blocks of 4 classes, 4 kinds of node
        >>> slowest = max(result.K_graph.compute, key=lambda node: node.time_ms)
        >>> rkgb.print_all_graphs(result, name="model")  # pictures of all of them

    Raises:
        TraceError, UnsupportedOpError: the model cannot be captured exactly; see the message.
    """
    given = Sample.of(model, sample, kwargs)
    sg = D_to_S(B_to_D(record(model, given)))
    inspection = inspect_model(
        sg, model, given.device, inputs=given.args, kwargs=given.kwargs, cost=cost
    )
    return _assemble(sg, inspection)


def _assemble(sg: SimplifiedGraph, inspection: Inspection) -> RkgbResult:
    blocks = cut(sg)
    anonymous = [anonymize(block) for block in blocks]
    classes = equivalence_classes([graph.key for graph in anonymous])
    return RkgbResult(
        B_graph=sg.basic,
        D_graph=sg.dataflow,
        S_graph=sg,
        K_graph=k_graph(sg, inspection.facts),
        S_graph_list=tuple(blocks),
        K_graph_list=tuple(k_graph(b, node_facts(b, inspection.costs)) for b in blocks),
        equivalent_classes=tuple(map(tuple, classes)),
        list_ano_S=tuple(anonymous),
        inspection=inspection,
    )
