"""The published entry points: every graph of a module in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from rkgb.anonymize import AnonymousGraph, anonymize, equivalence_classes
from rkgb.backward import KGraph, inspect_model, k_graph
from rkgb.basic import BasicGraph, bind_inputs, check_device, make_B
from rkgb.dataflow import B_to_D, DataFlowGraph
from rkgb.inspect_op import Inspection
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
    cost: Literal["measured", "flops"] = "measured",
) -> RkgbResult:
    """Return every graph of `model` on `sample`: a tensor, a tuple of arguments, or a dict.

    The model is captured in the mode it is in (train or eval) and left as it was.

    Raises:
        TraceError, UnsupportedOpError: the model cannot be captured exactly; see the message.
    """
    args, keywords = bind_inputs(sample, kwargs)
    device = check_device(model, (args, keywords), None)
    bg = make_B(model, args, device, kwargs=keywords)
    dg = B_to_D(bg, model, args, device, kwargs=keywords)
    sg = D_to_S(dg, model, device)
    pieces = cut(sg)
    anonymous = [anonymize(piece) for piece in pieces]
    classes = equivalence_classes([graph.key for graph in anonymous])
    inspection = inspect_model(sg, model, device, inputs=args, kwargs=keywords, cost=cost)
    return RkgbResult(
        B_graph=bg,
        D_graph=dg,
        S_graph=sg,
        K_graph=k_graph(sg, inspection),
        S_graph_list=tuple(pieces),
        K_graph_list=tuple(_pieces_of(sg, pieces, inspection)),
        equivalent_classes=tuple(map(tuple, classes)),
        list_ano_S=tuple(anonymous),
        inspection=inspection,
    )


def _pieces_of(
    sg: SimplifiedGraph, pieces: list[SimplifiedGraph], inspection: Inspection
) -> list[KGraph]:
    graphs = []
    start = 0
    for piece in pieces:
        end = start + len(piece.nodes)
        part = Inspection(inspection.runner, inspection.facts[start:end], (), 0.0)
        graphs.append(k_graph(piece, part))
        start = end
    return graphs


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
