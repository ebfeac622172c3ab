"""How the number of options of a block changes the plan and the time to find it.

    $ python benchmarks/Options_exp.py               # CPU sizes
    $ python benchmarks/Options_exp.py --smoke
    $ python benchmarks/Options_exp.py --paper       # the papers' networks and grids, on CUDA

A strategy "5x8" offers rotor up to 5 peak times 8 saved budgets per class of blocks, fewer where
they coincide. The chain of blocks alone is planned: no other planner and no search mends what a
coarse grid loses. Costs are FLOPs, so that plans do not depend on the machine. Rows: options.csv.
"""

from __future__ import annotations

import itertools
import sys

from harness.experiment import main
from harness.networks import NETWORKS
from harness.points import Experiment, Options, Point
from Performance_exp import gibibytes

GRIDS = {
    "smoke": ((2, 2), (3, 3)),
    "cpu": ((2, 2), (3, 3), (5, 8), (10, 10), (20, 20)),
    "paper": ((3, 3), (5, 5), (5, 8), (10, 10), (20, 20), (30, 30)),
}
BUDGETS = {
    "smoke": {"gpt2-small": ["60%"]},
    "cpu": {"gpt2-medium": ["50%", "30%"], "resnet50": ["60%", "40%"]},
    "paper": {"gpt2-medium": gibibytes(((0.8, 4, 0.4),)), "resnet101": gibibytes(((1, 8, 1),))},
}


def points(options: Options) -> list[Point]:
    """Return every grid at every budget of every network."""
    found = []
    for network, budgets in BUDGETS[options.size].items():
        batch = NETWORKS[network].sizes[options.size]["batch"]
        for (peaks, saves), budget in itertools.product(GRIDS[options.size], budgets):
            grid = f"{peaks}x{saves}"
            found.append(Point("options", network, options.size, batch, grid, budget, options.seed))
    return found


EXPERIMENTS = (Experiment("options", "measures.planning:options", points),)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS, __doc__))
