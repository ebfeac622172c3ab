"""From a recorded step to a network that is measured, and a plan that runs and was tested.

Gets a recording and a plan; gives a `Network`, whose problem planners solve, and a `Planned`, whose
`run` is a forward within the budget. Read network.py (recorded and measured), network_problem.py
(as a problem), executables.py (the program of a plan), planned.py (how a step runs it), variants.py
with likely.py (programs for other gradients), keeping.py (what compiled pieces may keep more),
cutting.py (what runs in pieces of rows) and self_test.py (one step against plain PyTorch).
"""

from rockmate.networks.planned import Planned, compiled_part, cut_parts

__all__ = ["Planned", "compiled_part", "cut_parts"]
