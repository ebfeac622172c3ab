"""How long graphs take to build, against torch.export alone in the same run.

$ python benchmarks/rkgb_speed.py            # GPT-2 of 12, 24, 48 and 96 layers, some minutes
$ python benchmarks/rkgb_speed.py --smoke    # 2 and 4 layers

B, D and S are built without measuring anything. Every pair of times comes from one process, the two
alternating, and the smallest of the repeats counts: a shared machine only ever adds time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import rkgb
from models.GPT import GPT2


def network(layers: int) -> tuple[GPT2, Tensor]:
    """Return a narrow GPT-2 in train mode: building graphs should not be about multiplying."""
    torch.manual_seed(0)
    model = GPT2(nlayers=layers, d_model=64, n_heads=4, vocab=128, max_length=32)
    return model.train(), torch.randint(128, (1, 16))


def export(model: GPT2, sample: Tensor) -> None:
    """Run what rkgb builds on, alone."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.export.export(model, (sample,), strict=False)


def build(model: GPT2, sample: Tensor) -> None:
    """Build B, D, S and the blocks."""
    bg = rkgb.Btools.make_B(model, sample)
    dg = rkgb.Dtools.B_to_D(bg, model, sample)
    rkgb.Stools.cut(rkgb.Stools.D_to_S(dg, model))


def seconds(run: Callable[[GPT2, Tensor], None], model: GPT2, sample: Tensor) -> float:
    """Return the wall time of one run."""
    gc.collect()
    start = time.perf_counter()
    run(model, sample)
    return time.perf_counter() - start


def main() -> int:
    """Print one row per depth: seconds of both, their ratio, and seconds per layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small depths, one repeat")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    layers = [2, 4] if options.smoke else options.layers
    repeats = 1 if options.smoke else options.repeats
    torch.set_num_threads(1)
    model, sample = network(1)
    export(model, sample)
    build(model, sample)  # both once, so that imports are paid for
    print(f"{'layers':>6} {'export s':>9} {'B, D, S s':>9} {'ratio':>6} {'ms/layer':>9}")
    for depth in layers:
        model, sample = network(depth)
        pairs = [
            (seconds(export, model, sample), seconds(build, model, sample)) for _ in range(repeats)
        ]
        alone, ours = (min(times) for times in zip(*pairs, strict=True))
        ratio, per_layer = ours / alone, 1e3 * ours / depth
        print(f"{depth:6} {alone:9.3f} {ours:9.3f} {ratio:6.2f} {per_layer:9.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
