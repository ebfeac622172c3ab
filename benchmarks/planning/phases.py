"""How long planning takes, phase by phase, and what the executor costs when nothing is recomputed.

Each network is planned at half of its plain peak, and the phases are timed. Some are planned a
second time, at the whole of it, and a step is compared with a plain one, in turn, so that both meet
the same noise. The layers of a GPT-2 are equal: phases that work per class of blocks should hardly
grow with depth.

    $ make planning
    $ python -m planning.phases --smoke      # tiny sizes, to see that it runs
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import meter
from models.GPT import GPT2WithLoss
from models.loss import WithLoss
from models.resnet import resnet50, resnet101
from models.unet import UNet
from rockmate import Rockmate

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PhaseCase:
    """A network and a sample for it."""

    name: str
    make_model: Callable[[], nn.Module]
    make_sample: Callable[[], Sample]
    compare: bool = True  # also compare its step at 100 % with a plain one


def gpt2(layers: int, d_model: int, batch: int, length: int) -> PhaseCase:
    """Return a GPT-2 over bytes, with its loss inside."""

    def make_model() -> nn.Module:
        heads = d_model // 64 or 1
        return GPT2WithLoss(
            layers, 0.1, d_model=d_model, n_heads=heads, vocab=256, max_length=length
        )

    def make_sample() -> Sample:
        tokens = torch.randint(256, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return PhaseCase(f"GPT-2, {layers} layers, d = {d_model}", make_model, make_sample)


def resnet(make: Callable[..., nn.Module], width: int, batch: int, size: int) -> PhaseCase:
    """Return a ResNet with its loss inside."""
    name = f"ResNet-{make.__name__.removeprefix('resnet')}, width {width}"
    return PhaseCase(
        name,
        lambda: WithLoss(make(width=width, num_classes=10)),
        lambda: (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))),
    )


def unet(width: int, depth: int, batch: int, size: int) -> PhaseCase:
    """Return a U-Net with its loss inside."""
    return PhaseCase(
        f"U-Net, width {width}, depth {depth}",
        lambda: WithLoss(UNet(width=width, depth=depth)),
        lambda: (torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size))),
    )


def compare_steps(
    plain: nn.Module, ours: nn.Module, sample: Sample, steps: int
) -> tuple[float, float]:
    """Return the median of (our time / plain time) over steps in turn, and the median plain ms."""
    device = sample[0].device
    times: list[tuple[float, float]] = []
    for number in range(steps):
        took = {}
        pair = [("plain", plain), ("ours", ours)]
        for name, module in pair if number % 2 else reversed(pair):
            module.zero_grad(set_to_none=False)
            took[name] = meter.timed_ms(lambda m=module: m(*sample).backward(), device)
        times.append((took["ours"], took["plain"]))
    timed = times[2:]  # the first ones allocate gradients and fill caches
    ratio = statistics.median(ours / plain for ours, plain in timed)
    return ratio, statistics.median(plain for _, plain in timed)


def measure(case: PhaseCase, device: torch.device, steps: int) -> dict[str, object]:
    """Plan the network twice, compare steps, and return one row of figures."""
    torch.manual_seed(0)
    model = case.make_model().to(device)
    x, y = case.make_sample()
    sample = (x.to(device), y.to(device))
    half = Rockmate(copy.deepcopy(model), sample, budget=0.5, cache=False)
    row: dict[str, object] = {
        "network": case.name,
        "nodes": len(half.plan.problem.nodes),
        **{f"{phase}_s": f"{took:.2f}" for phase, took in half.planning_seconds.items()},
        "total_s": f"{sum(half.planning_seconds.values()):.2f}",
        "overhead_at_50_percent": f"{half.plan.overhead_percent:.1f}",
        "gap_percent": "" if half.plan.gap is None else f"{100 * half.plan.gap:.2f}",
        "plain_step_ms": "",
        "step_over_plain_at_100_percent": "",
    }
    del half
    if case.compare:
        whole = Rockmate(copy.deepcopy(model), sample, budget=1.0, cache=False)
        ratio, plain_ms = compare_steps(model, whole, sample, steps)
        row["plain_step_ms"] = f"{plain_ms:.1f}"
        row["step_over_plain_at_100_percent"] = f"{ratio:.3f}"
    return row


def main() -> int:
    """Measure every case and print and write one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--steps", default=22, type=int)
    parser.add_argument("--out", default=meter.RESULTS / "latest", type=Path)
    options = parser.parse_args()
    if options.smoke:
        cases = [
            gpt2(2, 32, 2, 16),
            gpt2(4, 32, 2, 16),
            resnet(resnet50, 8, 2, 32),
            unet(4, 2, 2, 16),
        ]
    else:
        cases = [
            gpt2(12, 256, 4, 128),
            gpt2(48, 256, 4, 128),
            replace(gpt2(96, 256, 4, 128), compare=False),
            resnet(resnet50, 64, 4, 128),
            replace(resnet(resnet101, 64, 4, 128), compare=False),
            replace(unet(16, 4, 8, 128), compare=False),
        ]

    environment = meter.environment(options.device)
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    rows: list[dict[str, object]] = []
    for case in cases:
        row = measure(case, options.device, options.steps)
        rows.append(row)
        print(f"\n{case.name}")
        for key, value in list(row.items())[1:]:
            print(f"  {key.replace('_', ' '):34} {value:>8}", flush=True)
        meter.write_csv(options.out / "phases.csv", [{**r, **environment} for r in rows])
    print(f"\nwritten: {options.out / 'phases.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
