"""Llamas of 70 and of 405 billion parameters on 64 to 4096 ranks, planned without any of them.

    $ .venv/bin/python benchmarks/scale.py            # benchmarks/results/scale.csv, docs/scale.md
    $ .venv/bin/python benchmarks/scale.py --smoke    # tiny, to see that it runs

One layer, as one rank runs it, is recorded by sizes on the device `meta` and gets its options. The
options of all layers are chosen together, as `apply_to_blocks` does, within what is left of a
device's memory on a rank. What FSDP2 holds and moves is a model, written in `Step`. Times are FLOPs
and bytes with the rates of the device that is assumed (`Device`), not of the one that is there.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

import rkgb
import rockmate
from models.llama_rank import LINKS, Ends, Layer, Llama
from rockmate.planning import (
    BlockOption,
    Choice,
    ModuleCall,
    StepMemory,
    choose,
    module_options,
    peak_of,
    smallest_budget,
)

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
GIB = 2**30
_STATE_BYTES = 16  # of a parameter: itself and its gradient in float32, two moments of AdamW
_SHORT = 2  # bytes of a number in bfloat16
_GATHERED = 2  # layers at once: the one that runs, and the next
_UNREDUCED = (
    3  # times a layer in bfloat16: its gradients, and the float32 copy that is being summed
)

LLAMAS = (
    Llama("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256, 8192),
    Llama("Llama 3 405B", 126, 16384, 128, 8, 53248, 128256, 8192),
)
# Ranks; how many of them share each layer and its sequences; how many sequences.
LAYOUTS = ((64, 1, 1), (64, 8, 1), (64, 8, 4), (512, 8, 2), (512, 8, 4), (4096, 8, 2))


@dataclass(frozen=True)
class Device:
    """What a rank has, and its rates; all of it is assumed."""

    memory_bytes: int = 79 * GIB  # that an H100 of 80 GB reports
    reserve_bytes: int = 3 * GIB  # CUDA's context, buffers of NCCL, workspaces of cuBLAS
    flops_per_ms: float = 5e11  # half of what the data sheet says for bfloat16
    memory_bytes_per_ms: float = 2.7e9
    group_bytes_per_ms: float = 3e8  # to each rank of a tensor-parallel group: NVLink
    network_bytes_per_ms: float = 5e7  # to each rank of the others: 400 Gbit/s

    @property
    def cost(self) -> rkgb.FlopCost:
        """FLOPs and bytes, weighed as on this device."""
        return rkgb.FlopCost(flops_per_byte=self.flops_per_ms / self.memory_bytes_per_ms)

    def ms(self, cost: float) -> float:
        """Return the time of 10^9 FLOPs times `cost`."""
        return cost * 1e9 / self.flops_per_ms


@dataclass(frozen=True)
class Parts:
    """Facts about a layer and the ends, as one rank of a tensor-parallel group runs them."""

    options: tuple[BlockOption, ...]  # of a layer; times are 10^9 FLOPs
    forward: float
    backward: float
    end_peak_bytes: int
    end: float


@lru_cache
def parts_of(size: Llama, tensor: int, sequences: int, device: Device) -> Parts:
    """Record a layer and the ends by sizes, and find the layer's options."""
    LINKS.flops_per_byte = device.flops_per_ms / device.group_bytes_per_ms
    with torch.device("meta"):
        layer, ends = Layer(size, tensor).bfloat16(), Ends(size, tensor).bfloat16()
        tokens = sequences * size.tokens
        x = torch.empty(tokens // tensor, size.width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.long)

    def recorded(module: torch.nn.Module, sample: tuple[Tensor, ...]) -> rockmate.Estimate:
        return rockmate.estimate(module, sample, device="cpu", cost=device.cost, progress=False)

    of_layer, of_ends = recorded(layer, (x,)), recorded(ends, (x, targets))
    problem = of_layer.problem
    return Parts(
        options=module_options(problem),
        forward=sum(node.fwd_time_ms for node in problem.nodes),
        backward=sum(node.bwd_time_ms for node in problem.nodes),
        end_peak_bytes=of_ends.activations_bytes,
        end=of_ends.problem.base_time_ms,
    )


@dataclass(frozen=True)
class Step:
    """One step on some ranks: what is resident, gathered and reduced on each, and how long."""

    size: Llama
    ranks: int
    tensor: int  # ranks that share each layer, and its sequences
    sequences: int
    device: Device

    @property
    def parts(self) -> Parts:
        """What one rank runs."""
        return parts_of(self.size, self.tensor, self.sequences, self.device)

    @property
    def resident_bytes(self) -> int:
        """Of parameters, gradients and the optimizer, and what the device keeps."""
        shards = -(-self.size.parameters // self.ranks) * _STATE_BYTES
        return shards + self.device.reserve_bytes

    @property
    def layer_bytes(self) -> int:
        """Of a layer's parameters in bfloat16, as they are gathered on a rank."""
        return self.size.layer_parameters * _SHORT // self.tensor

    @property
    def end_bytes(self) -> int:
        """The same of the head, and of the embedding."""
        return self.size.end_parameters * _SHORT // self.tensor

    @property
    def numbers(self) -> int:
        """Of one activation of the model's width: s b h."""
        return self.sequences * self.size.tokens * self.size.width

    @property
    def layer_input_bytes(self) -> int:
        """What is kept of a layer of which everything is computed again: 2 s b h / t."""
        return self.numbers * _SHORT // self.tensor

    @property
    def kept_by_formula(self) -> float:
        """What all layers keep, in bytes: s b h ((8 + 4 g/a + 8 i/h) / t + 4) for each."""
        size = self.size
        own = 8 + 4 * size.groups / size.heads + 8 * size.inner / size.width
        return size.layers * self.numbers * (own / self.tensor + 4)

    def memory(self) -> StepMemory:
        """Return the step in which every layer keeps everything."""
        parts, kept = self.parts, self.parts.options[0].saved_bytes
        gathered, unreduced = _GATHERED * self.layer_bytes, _UNREDUCED * self.layer_bytes
        ends = _UNREDUCED * self.end_bytes
        start = self.layer_input_bytes  # the output of the embedding
        calls = tuple(
            ModuleCall(
                name=f"layers.{place}",
                options=parts.options,
                reference=0,
                more_bytes=tuple(o.saved_bytes - kept for o in parts.options),
                forward_start_bytes=start + place * kept + gathered,
                after_forward_bytes=start + (place + 1) * kept + gathered,
                backward_base_bytes=start + place * kept + gathered + unreduced,
                after_backward_bytes=start
                + place * kept
                + unreduced
                + (gathered if place else ends),
            )
            for place in range(self.size.layers)
        )
        held = start + self.size.layers * kept
        turn = held + parts.end_peak_bytes + self.end_bytes + self.layer_bytes + ends
        return StepMemory(calls, start + self.end_bytes + self.layer_bytes, turn, held)

    def link_ms(self, layer_sizes: float) -> float:
        """Return the time in which a rank gets its share of so many layers in bfloat16."""
        replicas = self.ranks // self.tensor
        others = self.layer_bytes * layer_sizes * (replicas - 1) / replicas
        return others / self.device.network_bytes_per_ms

    @property
    def forward_ms(self) -> tuple[float, float]:
        """Of a layer: computing, and gathering the next one meanwhile."""
        return self.device.ms(self.parts.forward), self.link_ms(1)

    @property
    def backward_ms(self) -> tuple[float, float]:
        """The same in the backward, where gradients are summed in float32 too."""
        return self.device.ms(self.parts.backward), self.link_ms(1 + 2)

    def computing_ms(self) -> float:
        """Return the time of a step without recomputation in which nothing waits for links."""
        layer, ends = self.parts.forward + self.parts.backward, self.parts.end
        return self.device.ms(self.size.layers * layer + ends)

    def seen_ms(self, again: Iterable[float]) -> float:
        """Return the time of a step in which each layer computes so many 10^9 FLOPs again."""
        (forward, gather), (backward, links) = self.forward_ms, self.backward_ms
        backwards = [max(backward + self.device.ms(more), links) for more in again]
        layers = len(backwards) * max(forward, gather) + sum(backwards)
        return layers + self.device.ms(self.parts.end)


def row_of(step: Step) -> dict[str, object]:
    """Plan for some ranks, and say what a rank holds, and what that costs."""
    began = time.process_time()
    memory, layers = step.memory(), step.size.layers
    budget = step.device.memory_bytes - step.resident_bytes
    found = choose(memory, budget) if budget > 0 else None
    chosen = found or Choice((), 0, 0.0)
    again = [step.parts.options[number].overhead_ms for number in chosen.options]
    (forward, gather), (backward, links) = step.forward_ms, step.backward_ms
    row: dict[str, object] = {
        "model": step.size.name,
        "ranks": step.ranks,
        "tensor": step.tensor,
        "sequences": step.sequences,
        "resident_bytes": step.resident_bytes,
        "budget_bytes": budget,
        "kept_bytes": layers * step.parts.options[0].saved_bytes,
        "kept_by_formula_bytes": round(step.kept_by_formula),
        "keeping_all_bytes": peak_of(memory, [0] * layers),
        "smallest_budget_bytes": smallest_budget(memory),
        "planned_peak_bytes": "",
        "extra_computing": "",
        "extra_time": "",
        "checkpoint_extra_time": "",
        "layers_recomputing": "",
        "forward_ms": round(forward, 2),
        "gather_ms": round(gather, 2),
        "backward_ms": round(backward, 2),
        "backward_links_ms": round(links, 2),
    }
    if found:
        plain_ms = step.seen_ms([0.0] * layers)
        row["planned_peak_bytes"] = chosen.peak_bytes
        row["extra_computing"] = round(step.device.ms(sum(again)) / step.computing_ms(), 4)
        row["extra_time"] = round(step.seen_ms(again) / plain_ms - 1, 4)
        every = step.seen_ms([step.parts.forward] * layers)
        row["checkpoint_extra_time"] = round(every / plain_ms - 1, 4)
        row["layers_recomputing"] = sum(1 for more in again if more > 0)
    row["planning_seconds"] = round(time.process_time() - began, 1)
    return row


def memory_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return the bytes of the rows as a table in Markdown."""
    lines = [
        "| model | ranks, share, sequences | resident | left | keeping all | smallest | planned |",
        f"| --- | --- {'| ---: ' * 5}|",
    ]
    for row in rows:
        names = ("resident", "budget", "keeping_all", "smallest_budget", "planned_peak")
        sizes = [row[f"{name}_bytes"] for name in names]
        told = [
            f"{b / GIB:.1f} GiB" if isinstance(b, int) and b > 0 else "nothing" for b in sizes[:4]
        ]
        peak = sizes[4]
        told.append(f"{peak / GIB:.1f} GiB" if isinstance(peak, int) else "none fits")
        lines.append(f"| {' | '.join([str(row['model']), _layout(row), *told])} |")
    return lines


def time_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return the times of the rows that have a plan as a table in Markdown."""
    lines = [
        "| model | ranks, share, sequences | computed again | extra time | by checkpoint | "
        "forward | backward |",
        f"| --- | --- {'| ---: ' * 3}| --- | --- |",
    ]
    for row in rows:
        names = ("extra_computing", "extra_time", "checkpoint_extra_time")
        shares = [row[name] for name in names]
        if not all(isinstance(share, float) for share in shares):
            continue
        told = [f"{100 * float(str(share)):.1f} %" for share in shares]
        pairs = (("forward_ms", "gather_ms"), ("backward_ms", "backward_links_ms"))
        told += [_waits(float(str(row[a])), float(str(row[b]))) for a, b in pairs]
        lines.append(f"| {' | '.join([str(row['model']), _layout(row), *told])} |")
    return lines


def _layout(row: dict[str, object]) -> str:
    return ", ".join(str(row[name]) for name in ("ranks", "tensor", "sequences"))


def _waits(computing_ms: float, links_ms: float) -> str:
    """Say for what a layer waits, and how long either takes."""
    name = "links" if links_ms > computing_ms else "computing"
    return f"{name} ({computing_ms:.0f}, {links_ms:.0f} ms)"


def kept_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return what all layers keep, as recorded and by the formula."""
    lines = [
        "| model | share a layer | sequences | recorded | by the formula |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    seen = {tuple(row[n] for n in ("model", "tensor", "sequences")): row for row in rows}
    for names, row in seen.items():
        found, formula = (float(str(row[f"{n}_bytes"])) for n in ("kept", "kept_by_formula"))
        lines.append(
            f"| {' | '.join(map(str, names))} | {found / GIB:.1f} GiB | {formula / GIB:.1f} GiB |"
        )
    return lines


def page(rows: Sequence[dict[str, object]], sizes: Sequence[Llama], device: Device) -> str:
    """Return the page of the documentation."""
    shapes = "\n".join(
        f"* {s.name}: {s.layers} layers of width {s.width}, {s.heads} heads with {s.groups} for "
        f"keys and values, inner width {s.inner}, {s.vocab} words, "
        f"{s.parameters / 1e9:.1f} billion parameters"
        for s in sizes
    )
    seconds = sum(float(str(row["planning_seconds"])) for row in rows)
    return f"""# Large Llamas on many ranks

What would plans be worth for models of this size? Nothing was run. `benchmarks/scale.py` records
one layer by sizes, as one rank runs it. Then it chooses how every layer runs, so that all layers
together stay within the memory that is left.

{shapes}

A sequence has {sizes[0].tokens} tokens. Numbers are bfloat16, and the optimizer is AdamW in
float32. FSDP2 shards every layer over all ranks. The first number of a row is that of the ranks,
the second says how many of them share each layer (tensor and sequence parallelism), the third how
many sequences these have in a step.

## Memory

{chr(10).join(memory_table(rows))}

* **Resident**: {_STATE_BYTES} bytes of each parameter (float32: itself, its gradient, two moments)
  over all ranks, and {device.reserve_bytes / GIB:.0f} GiB for CUDA's context, NCCL's buffers and
  workspaces.
* **Left** is the rest of {device.memory_bytes / GIB:.0f} GiB. The columns after it count
  activations, and what FSDP2 has gathered and not yet reduced: {_GATHERED} layers in bfloat16 (the
  one that runs and the next one). The backward holds {_UNREDUCED} times a layer more: its gradients
  in bfloat16, and their copy in float32 that is being summed.

## Time

{chr(10).join(time_table(rows))}

* **Computed again** is a share of the computing of a plain step.
* **Extra time** is what a user would see. Where a layer waits for links, what is computed again
  meanwhile costs nothing.
* **By checkpoint** is the extra time if every layer is computed again, which is the usual choice.
* **Forward, backward**: what a layer waits for, how long its computing takes, and how long links
  take meanwhile. They gather the next layer, and in the backward also sum up the gradients of the
  layer before.

## What a layer keeps, by a formula

Korthikanti et al. (2022, "Reducing Activation Recomputation in Large Transformer Models") count
what a layer keeps in units of s·b·h: sequence length s, batch b, width h. A layer of GPT without
its attention matrix keeps 34/t bytes of each, over t ranks that share its sequences. A layer of a
Llama with FlashAttention and fused norms keeps, in bytes for each of s·b·h:

| kept | bytes |
| --- | ---: |
| inputs of the two norms, of which each rank has its share | 4 / t |
| outputs of the two norms, which are gathered | 4 |
| queries; keys and values, g for a heads | (2 + 4 g/a) / t |
| output of the attention | 2 / t |
| gate, up, SiLU of gate, their product, of inner width i | 8 (i/h) / t |

Together that is ((8 + 4 g/a + 8 i/h) / t + 4) s·b·h. For 64 heads, 8 groups and i = 3.5 h it is
40.5 s·b·h with t = 1. A layer that is computed again as a whole keeps its input, 2 s·b·h / t.

{chr(10).join(kept_table(rows))}

Beside this, the recording counts one float32 number for each row of a norm and of each head's
attention.

## Rates that are assumed

* A rank does {device.flops_per_ms / 1e9:.0f} TFLOP/s in matrix products and attention, half of the
  data sheet's figure for an H100, and moves {device.memory_bytes_per_ms / 1e6:.0f} GB/s of its
  memory. An operation takes the sum of both times.
* {device.group_bytes_per_ms / 1e6:.0f} GB/s come to each rank of those that share a layer.
  Computing waits for these links.
* {device.network_bytes_per_ms / 1e6:.0f} GB/s come to each rank from all others, while it computes.
* Causal attention has half of the FLOPs of full attention. Its backward has 2.5 times as many as
  its forward, the backward of a matrix product twice as many.

Planning all rows took {seconds:.0f} s of one core.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    options = parser.parse_args()
    sizes, device, layouts = LLAMAS, Device(), LAYOUTS
    if options.smoke:
        sizes = (Llama("tiny", 4, 64, 8, 4, 128, 128, 64),)
        device, layouts = Device(500_000, 1000), ((8, 1, 1), (64, 2, 2))
    rows = [row_of(Step(s, *layout, device)) for s in sizes for layout in layouts]
    out = options.out / "latest" / "smoke" if options.smoke else options.out
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scale.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *asdict(device)])
        writer.writeheader()
        writer.writerows({**row, **asdict(device)} for row in rows)
    text = page(rows, sizes, device)
    (out / "scale.md" if options.smoke else PAGE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
