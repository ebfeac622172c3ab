"""How long planning takes: Rockmate, rotor and Checkmate on GPT-2 of growing depth and ResNets.

    $ python benchmarks/Solvingtime_exp.py               # CPU
    $ python benchmarks/Solvingtime_exp.py --smoke
    $ python benchmarks/Solvingtime_exp.py --paper       # widths of the paper, on CUDA

rotor is the package's dynamic program over the blocks as its user cut them. Checkmate is one 0/1
program over the whole graph, here in our compact form (fewer variables than the published one) and
with an open-source solver, stopped at a limit. Capturing and measuring the network is its own
column (`prepare_seconds`); `solve_seconds` is what the papers show. Rows: planning.csv.
"""

from __future__ import annotations

import sys

from harness.experiment import main
from harness.networks import NETWORKS
from harness.points import Experiment, Options, Point

DEPTHS = {
    "smoke": (1, 2),
    "cpu": (2, 4, 6, 8, 10, 12, 24, 48),
    "paper": (2, 4, 6, 8, 10, 12, 24, 48),
}
RESNETS = {
    "smoke": (),
    "cpu": ("resnet50", "resnet101", "resnet152"),
    "paper": ("resnet50", "resnet101", "resnet152"),
}
CHECKMATE_DEPTHS = {"smoke": (1,), "cpu": (2, 4, 6), "paper": (2, 4, 6, 8, 10)}
BUDGET = "60%"


def points(options: Options) -> list[Point]:
    """Return every planner on every network that it has a chance with."""
    size, seed = options.size, options.seed
    found = []
    for depth in DEPTHS[size]:
        ways = ["rockmate", "rotor"]
        ways += ["checkmate cbc"] if depth in CHECKMATE_DEPTHS[size] else []
        found += [Point("planning", f"gpt2:{depth}", size, 2, way, BUDGET, seed) for way in ways]
    for network in RESNETS[size]:
        batch = NETWORKS[network].sizes[size]["batch"]
        ways = ["rockmate", "rotor"]
        ways += ["checkmate cbc"] if network == "resnet50" else []
        found += [Point("planning", network, size, batch, way, BUDGET, seed) for way in ways]
    return found


EXPERIMENTS = (Experiment("planning", "measures.planning:planning", points),)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS, __doc__))
