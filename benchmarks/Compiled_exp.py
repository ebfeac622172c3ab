"""Compiled pieces under a budget beside `torch.compile`, in one run.

    $ python benchmarks/Compiled_exp.py --only gpt
    $ python benchmarks/Compiled_exp.py --smoke

`Rockmate(..., compile=True)` without a budget that binds and at shares of the plain peak, beside
`torch.compile` with inductor at four values of `activation_memory_budget`. Times are over plain
PyTorch in the same process; FLOPs are counted as executed, for `torch.compile` over its graphs.
The Llama needs transformers.
Rows: compiled.csv.
"""

from __future__ import annotations

import sys

from harness.experiment import main
from harness.points import Experiment, Options, Point

BATCHES = {
    **{"gpt": (2, 8, 8), "gpt2-small": (1, 4, 4), "mlp-mixer": (2, 4, 8)},
    **{"unet": (1, 4, 4), "resnet50": (1, 4, 8), "llama": (1, 4, 4)},
}
SIZES = ("smoke", "cpu", "paper")
TORCH = ("1.0 dp", "0.7 dp", "0.5 dp", "0.3 dp")
# Least time; nothing run again, with what pieces cannot do without; and less.
OURS = ("100%", "63%", "45%", "30%", "20%")


def points(options: Options) -> list[Point]:
    """Return every network in every way; smoke: the smallest of each."""
    is_smoke = options.size == "smoke"
    ways = [
        ("plain", ""),
        *(("rockmate-compiled", share) for share in OURS[: 1 if is_smoke else 5]),
    ]
    ways += [] if is_smoke else [("compile", setting) for setting in TORCH]
    networks = ["gpt"] if is_smoke else list(BATCHES)
    size = SIZES.index(options.size)
    return [
        Point("compiled", network, options.size, BATCHES[network][size], *way, options.seed)
        for network in networks
        for way in ways
    ]


EXPERIMENTS = (Experiment("compiled", "measures.training:step", points),)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS, __doc__))
