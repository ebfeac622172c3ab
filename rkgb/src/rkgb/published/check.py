"""The published check of a module: every graph, run against the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from rkgb.api import RkgbResult, make_all_graphs
from rkgb.testing.assertions import assert_same_as_module


def test_rkgb(model: nn.Module, sample: Any, **options: Any) -> RkgbResult:
    """Build every graph, run the simplified one against the module, and print a summary.

    Raises:
        AssertionError: the graph's outputs differ from the module's.
    """
    result = make_all_graphs(model, sample, **options)
    assert_same_as_module(result.S_graph, model, sample, kwargs=options.get("kwargs"))
    print(result)
    return result


test_rkgb.__test__ = False  # type: ignore[attr-defined]  # a public function, not a pytest test
