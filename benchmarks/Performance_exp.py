"""Peak and step time of every network under every strategy; curves; throughput; planned blocks.

    $ python benchmarks/Performance_exp.py               # CPU sizes
    $ python benchmarks/Performance_exp.py --smoke
    $ python benchmarks/Performance_exp.py --paper       # the papers' sizes, on CUDA
    $ python benchmarks/Performance_exp.py --only resnet50

Rows: performance.csv, timeline.csv (memory over one step), throughput.csv (batch against speed
within the memory that plain PyTorch needs for the smallest batch), blocks.csv (`apply_to_blocks`
beside a checkpoint around every layer, by depth).
"""

from __future__ import annotations

import itertools
import sys

from harness.experiment import main
from harness.networks import NETWORKS
from harness.points import (
    CURVE_COLUMNS,
    POINT_COLUMNS,
    RESULT_COLUMNS,
    STAMP_COLUMNS,
    Experiment,
    Options,
    Point,
)

LOW = ("peak of checkpoint", "smallest")  # budgets that are measured in the point's own process
Span = tuple[float, float, float]  # first and last budget and their distance, in GiB
PAPER_BUDGETS: dict[str, tuple[Span, ...]] = {
    "gpt2-medium": ((0.6, 2, 0.1), (2, 8, 0.4)),
    "gpt2-large": ((0.45, 1, 0.1), (1, 2, 0.2), (2, 8, 0.4)),
    "resnet50": ((1.2, 2, 0.1), (2, 5, 0.2), (5, 7, 0.5)),
    "resnet101": ((1.2, 2, 0.1), (2, 5, 0.2), (5, 9, 0.5)),
    "regnet-x-3.2": ((1.5, 2.5, 0.1), (2.5, 4, 0.2), (4, 10, 0.5)),
    "regnet-y-1.6": ((1.5, 2.5, 0.1), (2.5, 4, 0.2), (4, 9, 0.5)),
}
NETS = tuple(name for name in NETWORKS if name not in ("gpt", "llama"))
SMOKE = {"gpt2-small": "60%", "resnet50": "80%", "unet": "80%", "fno": "80%"}
NO_CHAIN = ("unet", "transformer")  # rotor does not take them
INDUCTOR = ("mlp-mixer", "unet")
SHOWN = ("gpt2-small", "resnet50", "unet")  # more budgets on a CPU
DEEP = ("gpt2-medium", "gpt2-large", "resnet101", "resnet152")  # fewer points on a CPU


def settings(network: str, size: str) -> dict[str, list[str]]:
    """Return the budgets and settings of each strategy for one network."""
    if size == "smoke":
        few = {"plain": [""], "rockmate": [SMOKE[network], *(LOW if network == "unet" else ())]}
        if network in ("gpt2-small", "unet"):
            few |= {"rotor": ["70%"], "checkpoint": ["every block"], "selective": ["save heavy"]}
        if network == "gpt2-small":
            few["compile-aot"] = ["0.5"]
        return few
    if size == "paper":
        spans = PAPER_BUDGETS.get(network)
        budgets = gibibytes(spans) if spans else [f"{p}%" for p in range(90, 10, -10)]
        return {
            "plain": [""],
            "rockmate": [*budgets, *LOW],
            "rotor": [*budgets, *LOW],
            "checkpoint": ["every block", "every 2nd block", "every 4th block"],
            "selective": ["save heavy", "save every 2nd", "save attention"],
            "compile": [f"0.{n}" for n in (8, 6, 4, 2, 1)],
        }
    budgets = ["70%", "50%", "35%"] if network in SHOWN else ["60%", "40%"]
    found = {"plain": [""], "rockmate": [*budgets, *LOW], "rotor": [*budgets, *LOW]}
    found["checkpoint"] = ["every block"]
    found["selective"] = ["save heavy"]
    if network not in DEEP:
        found["checkpoint"].append("every 2nd block")
        # inductor compiles every kernel with a C++ compiler, which takes a minute a network here
        found["compile" if network in INDUCTOR else "compile-aot"] = ["0.5"]
    return found


def gibibytes(spans: tuple[Span, ...]) -> list[str]:
    """Return budgets over spans of the papers: "1.2GiB", …"""
    found = []
    for first, last, distance in spans:
        count = round((last - first) / distance)
        found += [f"{first + i * distance:g}GiB" for i in range(count + 1)]
    return list(dict.fromkeys(found))


def performance_points(options: Options) -> list[Point]:
    """Return every network under every strategy."""
    found = []
    for network in SMOKE if options.size == "smoke" else NETS:
        batch = NETWORKS[network].sizes[options.size]["batch"]
        for strategy, values in settings(network, options.size).items():
            once = strategy == "rotor" and network in NO_CHAIN  # one row that says why
            found += [
                Point("performance", network, options.size, batch, strategy, value, options.seed)
                for value in (values[:1] if once else values)
            ]
    return found


def timeline_points(options: Options) -> list[Point]:
    """Return the steps whose memory is drawn."""
    networks = ("gpt2-small",) if options.size == "smoke" else ("gpt2-small", "resnet50", "unet")
    budget = "60%" if options.size == "smoke" else "50%"
    ways = [("plain", ""), ("rockmate", budget), ("checkpoint", "every block")]
    return [
        Point(
            "timeline",
            network,
            options.size,
            NETWORKS[network].sizes[options.size]["batch"],
            strategy,
            setting,
            options.seed,
        )
        for network, (strategy, setting) in itertools.product(networks, ways)
    ]


THROUGHPUT = {
    "smoke": {"gpt2-small": (3, (3, 4))},
    "cpu": {"gpt2-small": (4, (4, 8, 12, 16, 24)), "resnet50": (8, (8, 12, 16, 24))},
    "paper": {
        "gpt2-medium": (4, (4, 6, 8, 12, 16, 24)),
        "gpt2-large": (2, (2, 3, 4, 6, 8, 12)),
        "resnet101": (200, (200, 300, 400, 600, 800)),
    },
}


def throughput_points(options: Options) -> list[Point]:
    """Return growing batches within the memory of plain PyTorch at the smallest."""
    ways = ["plain", "rockmate", "checkpoint every block", "selective save heavy"]
    found = []
    for network, (base, batches) in THROUGHPUT[options.size].items():
        for strategy, batch in itertools.product(ways, batches):
            if strategy == "plain" and batch > batches[1]:
                continue
            place = (network, options.size, batch, strategy, f"peak@{base}", options.seed)
            found.append(Point("throughput", *place))
    return found


DEPTHS = {"smoke": (2,), "cpu": (4, 16, 48, 96), "paper": (4, 16, 48, 96)}


def blocks_points(options: Options) -> list[Point]:
    """Return networks of growing depth, all layers checkpointed or planned, at the same peak."""
    ways = [("checkpoint", "every block"), ("rockmate", LOW[0])]
    ways += [("rockmate-blocks", budget) for budget in LOW]
    batch = NETWORKS["gpt2-small"].sizes[options.size]["batch"]
    networks = [f"gpt2-small:{depth}" for depth in DEPTHS[options.size]]
    return [
        Point("blocks", network, options.size, batch, *way, options.seed)
        for network, way in itertools.product(networks, ways)
    ]


EXPERIMENTS = (
    Experiment("performance", "measures.training:step", performance_points),
    Experiment("blocks", "measures.training:step", blocks_points),
    Experiment(
        "timeline",
        "measures.training:timeline",
        timeline_points,
        (*POINT_COLUMNS, *RESULT_COLUMNS, *CURVE_COLUMNS, *STAMP_COLUMNS),
    ),
    Experiment("throughput", "measures.training:throughput", throughput_points),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS, __doc__))
