"""From a recorded step to a measured network, and to a plan that runs and was tested.

Gets a recording and a plan; gives a `Network`, whose problem planners solve, and a `Planned`, whose
`run` is a forward within the budget. Read network.py (recording and costs), network_problem.py (the
problem), executables.py (the program of a plan), planned.py (running a step), variants.py with
likely.py (programs for other gradients), keeping.py (compiled pieces that save more), cutting.py
(parts in pieces of rows) and self_test.py (one step against plain PyTorch).
"""

from rockmate.networks.network_problem import has_sparse_gradients
from rockmate.networks.planned import Planned, compiled_part, cut_parts, with_least_peak

__all__ = ["Planned", "compiled_part", "cut_parts", "has_sparse_gradients", "with_least_peak"]
