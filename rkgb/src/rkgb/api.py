"""The published entry points: every graph of a module in one call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rkgb import serialize
from rkgb.anonymize import AnonymousGraph, anonymize, equivalence_classes
from rkgb.backward import KGraph, k_graph
from rkgb.basic import BasicGraph, bind_inputs, check_device
from rkgb.capture.record import make_B
from rkgb.costs.inspection import CostChoice, Inspection, inspect_model
from rkgb.costs.node_facts import node_facts
from rkgb.costs.op_costs import OpCost
from rkgb.costs.recorded_costs import RecordedCosts
from rkgb.dataflow import B_to_D, DataFlowGraph
from rkgb.errors import InvalidGraphError
from rkgb.simplified import D_to_S, SimplifiedGraph, cut


@dataclass(frozen=True)
class RkgbResult:
    """Every graph of one module on one sample."""

    B_graph: BasicGraph
    D_graph: DataFlowGraph
    S_graph: SimplifiedGraph
    K_graph: KGraph
    S_graph_list: tuple[SimplifiedGraph, ...]  # the pieces between articulation points
    K_graph_list: tuple[KGraph, ...]
    equivalent_classes: tuple[tuple[int, ...], ...]  # equal pieces, by position
    list_ano_S: tuple[AnonymousGraph, ...]
    inspection: Inspection

    @property
    def costs(self) -> RecordedCosts:
        """What each kind of operation costs; to be saved and used as `cost=` elsewhere."""
        return RecordedCosts.of(self.inspection)

    def save(self, path: str | Path) -> None:
        """Write the graphs and their costs into a JSON file.

        Raises:
            InvalidGraphError: an operation has no name that another process would know.
        """
        inspection = self.inspection
        rows = {
            "format": serialize.FORMAT,
            "graph": serialize.basic_to_json(self.B_graph),
            "device": inspection.device,
            "costs": {key: asdict(cost) for key, cost in inspection.costs.items()},
            "classes": inspection.classes,
            "seconds": inspection.seconds,
        }
        Path(path).write_text(json.dumps(rows), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RkgbResult:
        """Read a file that `save` wrote: neither the model nor its device is needed.

        Raises:
            InvalidGraphError: the file is something else, or holds operators unknown here.
        """
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(rows, dict) or rows.get("format") != serialize.FORMAT:
            raise InvalidGraphError(
                f"'{path}' is no file of graphs: expected format '{serialize.FORMAT}'."
            )
        sg = D_to_S(B_to_D(serialize.basic_from_json(rows["graph"])))
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

    The model is captured in the mode it is in (train or eval) and left as it was. `cost` says where
    times come from: "measured" here and now, "flops" (deterministic), or `RecordedCosts` of a run
    elsewhere.

    Raises:
        TraceError, UnsupportedOpError: the model cannot be captured exactly; see the message.
    """
    args, keywords = bind_inputs(sample, kwargs)
    device = check_device(model, (args, keywords), None)
    sg = D_to_S(B_to_D(make_B(model, args, device, kwargs=keywords)))
    inspection = inspect_model(sg, model, device, inputs=args, kwargs=keywords, cost=cost)
    return _assemble(sg, inspection)


def _assemble(sg: SimplifiedGraph, inspection: Inspection) -> RkgbResult:
    pieces = cut(sg)
    anonymous = [anonymize(piece) for piece in pieces]
    classes = equivalence_classes([graph.key for graph in anonymous])
    return RkgbResult(
        B_graph=sg.dataflow.basic,
        D_graph=sg.dataflow,
        S_graph=sg,
        K_graph=k_graph(sg, inspection.facts),
        S_graph_list=tuple(pieces),
        K_graph_list=tuple(k_graph(p, node_facts(p, inspection.costs)) for p in pieces),
        equivalent_classes=tuple(map(tuple, classes)),
        list_ano_S=tuple(anonymous),
        inspection=inspection,
    )


def test_rkgb(model: nn.Module, sample: Any, **options: Any) -> RkgbResult:
    """Build every graph, run the simplified one against the module, and print a summary.

    Raises:
        AssertionError: the graph's outputs differ from the module's.
    """
    from rkgb.testing import assert_same_as_module

    result = make_all_graphs(model, sample, **options)
    assert_same_as_module(result.S_graph, model, sample, kwargs=options.get("kwargs"))
    print(result)
    return result


test_rkgb.__test__ = False  # type: ignore[attr-defined]  # a public function, not a pytest test
