"""A Llama of 70 layers on 8, 64 and 512 ranks, planned layer by layer without any of them.

    $ .venv/bin/python benchmarks/scale.py            # benchmarks/results/scale.csv, docs/scale.md
    $ .venv/bin/python benchmarks/scale.py --smoke    # tiny, to see that it runs

One layer is recorded by sizes on the device `meta` and gets its options; the options of all layers
are chosen together, as `apply_to_blocks` does, within what is left of a device's memory on a rank.
What FSDP2 does is a model, written in `Ranks`: every layer is sharded with reshard_after_forward,
the next one is gathered while one runs, and gradients are reduced while the next ones are made.
Time is FLOPs or bytes over rates of a device and its links; `--costs` names a file with them.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

import rockmate
from rockmate.planning import (
    BlockOption,
    Choice,
    ModuleCall,
    Problem,
    StepMemory,
    choose,
    module_options,
    peak_of,
    smallest_budget,
)

RESULTS = Path(__file__).parent / "results"
TABLE = Path(__file__).parents[1] / "docs" / "scale.md"
GIB = 2**30
RANKS = (8, 64, 512)
_GATHERED = 2  # layers at once: the one that runs, and the next
_REDUCED = 2  # layers whose whole gradients are there at once
_STATE_BYTES = 16  # of a parameter: itself and its gradient in float32, two moments of AdamW


@dataclass(frozen=True)
class Size:
    """A Llama, and how many tokens a rank has in a step."""

    layers: int = 70
    width: int = 8192
    heads: int = 64
    groups: int = 8
    inner: int = 28672
    vocab: int = 32000
    tokens: int = 6144
    device_bytes: int = 141 * 10**9


@dataclass(frozen=True)
class Costs:
    """Rates of a device and its links, and where they come from."""

    where: str = (
        "assumed: 500 TFLOP/s in bfloat16, 3 TB/s of memory, 50 GB/s to and from every device"
    )
    flops_per_ms: float = 5e11
    memory_bytes_per_ms: float = 3e9
    link_bytes_per_ms: float = 5e7


class Layer(nn.Module):
    """One layer of a Llama, with grouped queries and without the rotation of positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.size = size.width, size
        kept = width // size.heads * size.groups
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kept, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        each = self.size.width // self.size.heads
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, each)).transpose(1, 2) for p in (self.q, self.k, self.v))
        many = self.size.heads // self.size.groups
        k, v = (t.repeat_interleave(many, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Ends(nn.Module):
    """What comes after the layers: norm, head and loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Parts:
    """Facts about the parts of the network on one rank; times are in FLOPs over the rate."""

    options: tuple[BlockOption, ...]
    layer_bytes: int  # of a layer's parameters in bfloat16
    layer_ms: float
    end_bytes: int  # of the head's parameters, and of the embedding's
    end_peak_bytes: int
    end_ms: float
    output_bytes: int  # of a layer
    parameters: int


def parts_of(size: Size, costs: Costs) -> Parts:
    """Record a layer and the head by sizes, and find the layer's options."""
    with torch.device("meta"):
        layer, ends = Layer(size).bfloat16(), Ends(size).bfloat16()
        x = torch.empty(1, size.tokens, size.width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, size.tokens, dtype=torch.long)
    of_layer = rockmate.estimate(layer, x)
    of_end = rockmate.estimate(ends, (x, targets))
    problem = timed(of_layer.problem, costs)
    options = module_options(problem)
    return Parts(
        options=options,
        layer_bytes=of_layer.parameters_bytes,
        layer_ms=problem.base_time_ms,
        end_bytes=of_end.parameters_bytes,
        end_peak_bytes=of_end.activations_bytes,
        end_ms=timed(of_end.problem, costs).base_time_ms,
        output_bytes=x.nbytes,
        parameters=size.layers * _count(layer) + _count(ends) + size.vocab * size.width,
    )


def timed(problem: Problem, costs: Costs) -> Problem:
    """Return a problem of 10^9 FLOPs in milliseconds: of arithmetic, or of reading and writing."""
    nodes = []
    for place, node in enumerate(problem.nodes):
        passed_ms = 2 * problem.bytes_of(problem.product_masks[place]) / costs.memory_bytes_per_ms
        back_ms = 2 * passed_ms if node.has_backward else 0.0
        ms = 1e9 / costs.flops_per_ms
        nodes.append(
            replace(
                node,
                fwd_time_ms=max(node.fwd_time_ms * ms, passed_ms),
                bwd_time_ms=max(node.bwd_time_ms * ms, back_ms),
            )
        )
    return replace(problem, nodes=tuple(nodes))


@dataclass(frozen=True)
class Ranks:
    """One step on some ranks: what is resident, gathered and reduced on each."""

    count: int
    size: Size
    parts: Parts
    costs: Costs

    @property
    def resident_bytes(self) -> int:
        """Of parameters, gradients and the optimizer; parts are rounded up."""
        return -(-self.parts.parameters // self.count) * _STATE_BYTES

    def memory(self) -> StepMemory:
        """Return the step in which every layer keeps everything."""
        parts, kept = self.parts, self.parts.options[0].saved_bytes
        gathered = _GATHERED * parts.layer_bytes
        gradients = _REDUCED * parts.layer_bytes
        start = parts.output_bytes  # of the embedding
        calls = tuple(
            ModuleCall(
                name=f"layers.{place}",
                options=parts.options,
                reference=0,
                more_bytes=tuple(o.saved_bytes - kept for o in parts.options),
                forward_start_bytes=start + place * kept + gathered,
                after_forward_bytes=start + (place + 1) * kept + gathered,
                backward_base_bytes=start + place * kept + gathered + gradients,
                after_backward_bytes=start + place * kept + gathered + gradients,
            )
            for place in range(self.size.layers)
        )
        held = start + self.size.layers * kept
        turn = held + parts.end_peak_bytes + 2 * parts.end_bytes + parts.layer_bytes
        return StepMemory(calls, start + parts.end_bytes + parts.layer_bytes, turn, held)

    def gather_ms(self, parameter_bytes: int) -> float:
        """Return the time in which a rank gets what it has not of some parameters."""
        others = parameter_bytes * (self.count - 1) / self.count
        return others / self.costs.link_bytes_per_ms

    def step_ms(self) -> float:
        """Return the time of a step without recomputation, where nothing waits for links."""
        return self.size.layers * self.parts.layer_ms + self.parts.end_ms


def row_of(ranks: Ranks) -> dict[str, object]:
    """Plan for some ranks, and say what a rank holds, when, and what it costs."""
    began = time.perf_counter()
    memory, parts, layers = ranks.memory(), ranks.parts, ranks.size.layers
    budget = ranks.size.device_bytes - ranks.resident_bytes
    keeping_all = peak_of(memory, [0] * layers)
    found = choose(memory, budget) if budget > 0 else None
    least = smallest_budget(memory)
    chosen = found or Choice((), 0, 0.0)
    again = sum(1 for number in chosen.options if parts.options[number].overhead_ms > 0)
    # A recomputation runs while its layer is gathered for the backward: nothing is gathered anew.
    layer_ms = ranks.gather_ms(parts.layer_bytes)
    gathers = 2 * (layers + 2) - 1  # the last is still there when the backward begins
    return {
        "ranks": ranks.count,
        "resident_bytes": ranks.resident_bytes,
        "budget_bytes": budget,
        "keeping_all_bytes": keeping_all,
        "smallest_budget_bytes": least,
        "planned_peak_bytes": chosen.peak_bytes if found else "",
        "extra_time": round(chosen.overhead_ms / ranks.step_ms(), 4) if found else "",
        "layers_recomputing": again if found else "",
        "gathered_at_once_bytes": _GATHERED * parts.layer_bytes,
        "unreduced_at_once_bytes": _REDUCED * parts.layer_bytes,
        "gathers_in_a_step": gathers,
        "layer_gather_ms": round(layer_ms, 3),
        "layer_forward_ms": round(parts.layer_ms / 3, 3),
        "choose_seconds": round(time.perf_counter() - began, 2),
    }


def table(rows: list[dict[str, object]], parts: Parts, size: Size, costs: Costs, s: float) -> str:
    """Return the page of the documentation."""
    lines = [
        f"# A Llama of {size.layers} layers on many ranks",
        "",
        f"Made by `benchmarks/scale.py`: width {size.width}, {size.heads} heads, {size.groups} "
        f"groups, inner width {size.inner}, {size.tokens} tokens in bfloat16 on each rank, FSDP2 "
        f"on every layer, AdamW in float32, devices of {size.device_bytes / 1e9:.0f} GB. Nothing "
        "was run at this size: a layer was recorded by sizes on the device `meta`, its times are "
        f"FLOPs or bytes over a rate ({costs.where}), and what FSDP2 holds is a model.",
        "",
        "| ranks | resident | left | keeping all | smallest budget | planned peak | extra time | "
        "layers that recompute |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        names = ("resident", "budget", "keeping_all", "smallest_budget", "planned_peak")
        sizes = [row[f"{name}_bytes"] for name in names]
        told = [f"{b / GIB:.1f} GiB" if isinstance(b, int) else "none fits" for b in sizes]
        extra = row["extra_time"]
        share = f"{100 * extra:.1f} %" if isinstance(extra, float) else ""
        cells = [str(row["ranks"]), *told, share, str(row["layers_recomputing"])]
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    slow = ", ".join(f"{r['layer_gather_ms']} ms on {r['ranks']}" for r in rows)
    lines += [
        "",
        f"**What is gathered when**: a layer's {parts.layer_bytes / GIB:.2f} GiB in front of its "
        "forward, while the layer before it runs, and again in front of its backward "
        f"({first['gathers_in_a_step']} times in a step, embedding and head included). At most "
        f"{_GATHERED} layers are gathered and the gradients of {_REDUCED} wait to be reduced. A "
        "recomputation runs while its layer is gathered for the backward, so a plan gathers "
        f"nothing more. A gather takes {slow} ranks; the forward of a layer takes "
        f"{first['layer_forward_ms']} ms.",
        "",
        f"Planning all of it took {s:.0f} s of one core; a layer has {len(parts.options)} options.",
    ]
    return "\n".join(lines) + "\n"


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--costs", type=Path, help="a JSON file with the fields of Costs")
    options = parser.parse_args()
    costs = Costs(**json.loads(options.costs.read_text())) if options.costs else Costs()
    size = Size(4, 64, 4, 2, 128, 100, 64, 3 * 10**6) if options.smoke else Size()
    began = time.process_time()
    parts = parts_of(size, costs)
    rows = [row_of(Ranks(count, size, parts, costs)) for count in RANKS]
    seconds = time.process_time() - began
    text = table(rows, parts, size, costs, seconds)
    out = options.out / "latest" / "smoke" if options.smoke else options.out
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scale.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *asdict(costs)])
        writer.writeheader()
        writer.writerows({**row, **asdict(costs)} for row in rows)
    (out / "scale.md" if options.smoke else TABLE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
