"""Oracles for whoever tests graphs: modules, graphs and programs compared bit for bit.

Gets a graph or a program and the module it came from; gives an AssertionError, or nothing. Read
`assertions`, then `k_walk` (a walk through K alone) and `check_program` (a checker that shares no
code with what writes programs); `examples` are the modules that the tests of this package use.
"""

from rkgb.testing.assertions import assert_same_gradients, gradients_of_graph, gradients_of_module
from rkgb.testing.check_program import check_program
from rkgb.testing.k_walk import assert_k_gives_gradients

__all__ = [
    "assert_k_gives_gradients",
    "assert_same_gradients",
    "check_program",
    "gradients_of_graph",
    "gradients_of_module",
]
