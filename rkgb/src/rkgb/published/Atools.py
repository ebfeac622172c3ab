"""Recognise equal blocks, so that each is measured once (A)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rkgb.atlas.anonymize import AnonymousGraph, anonymize, equivalence_classes, node_key
from rkgb.atlas.forward_backward import KGraph, S_to_K
from rkgb.atlas.inspection import CostChoice
from rkgb.graphs.simplified import SimplifiedGraph

__all__ = ["AnonymousGraph", "S_list_to_K_list_eco", "anonymize", "equivalence_classes", "node_key"]


def S_list_to_K_list_eco(
    list_sg: Sequence[SimplifiedGraph],
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    cost: CostChoice = "measured",
) -> tuple[list[list[int]], list[KGraph], list[AnonymousGraph]]:
    """Return (classes of equal blocks, one KGraph per block, the anonymous graphs).

    Equal blocks are measured once, on `inputs`, or else on random values of the recorded shapes.
    `cost` is that of `make_all_graphs`.
    """
    anonymous = [anonymize(sg) for sg in list_sg]
    classes = equivalence_classes([graph.key for graph in anonymous])
    graphs: dict[int, KGraph] = {}
    for members in classes:
        first = list_sg[members[0]]
        measured = S_to_K(first, model, device, inputs=inputs, kwargs=kwargs, cost=cost)
        for index in members:
            graphs[index] = measured.renamed(list_sg[index])
    return classes, [graphs[index] for index in range(len(list_sg))], anonymous
