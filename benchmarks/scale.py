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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

import rockmate
from models.llama_formulas import GATHERED, STATE_BYTES, UNREDUCED, Device, Formulas
from models.llama_rank import LINKS, Ends, Layer, Llama
from reports.scale_page import page
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
LLAMAS = (
    Llama("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256, 8192),
    Llama("Llama 3 405B", 126, 16384, 128, 8, 53248, 128256, 8192),
)
# Ranks; how many of them share each layer and its sequences; how many sequences.
LAYOUTS = ((64, 1, 1), (64, 8, 1), (64, 8, 4), (512, 8, 2), (512, 8, 4), (4096, 8, 2))


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
        shards = -(-self.size.parameters // self.ranks) * STATE_BYTES
        return shards + self.device.reserve_bytes

    @property
    def by_formula(self) -> Formulas:
        """The same by formulas."""
        return Formulas(self.size, self.tensor, self.sequences)

    def memory(self) -> StepMemory:
        """Return the step in which every layer keeps everything."""
        parts, kept = self.parts, self.parts.options[0].saved_bytes
        layer_bytes, end_bytes = self.by_formula.layer_bytes, self.by_formula.end_bytes
        gathered, unreduced = GATHERED * layer_bytes, UNREDUCED * layer_bytes
        ends = UNREDUCED * end_bytes
        start = self.by_formula.layer_input_bytes  # the output of the embedding
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
        turn = held + parts.end_peak_bytes + end_bytes + layer_bytes + ends
        return StepMemory(calls, start + end_bytes + layer_bytes, turn, held)

    def link_ms(self, layer_sizes: float) -> float:
        """Return the time in which a rank gets its share of so many layers in bfloat16."""
        replicas = self.ranks // self.tensor
        others = self.by_formula.layer_bytes * layer_sizes * (replicas - 1) / replicas
        return others / self.device.network_bytes_per_ms

    @property
    def forward_ms(self) -> tuple[float, float]:
        """Of a layer: computing, and gathering the next one meanwhile."""
        return self.device.ms(self.parts.forward), self.link_ms(1)

    @property
    def backward_ms(self) -> tuple[float, float]:
        """The same in the backward, where gradients are summed in float32 too."""
        return self.device.ms(self.parts.backward), self.link_ms(1 + 2)

    @property
    def ms_by_formula(self) -> tuple[float, float]:
        """Of computing a layer, forward and backward."""
        known, device = self.by_formula, self.device
        forward = device.formula_ms(known.forward_flops, known.forward_bytes, known.link_bytes)
        backward = device.formula_ms(known.backward_flops, known.backward_bytes, known.link_bytes)
        return forward, backward

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
    known, every = step.by_formula, step.device.ms(step.parts.forward * layers)
    row: dict[str, object] = {
        "model": step.size.name,
        "ranks": step.ranks,
        "tensor": step.tensor,
        "sequences": step.sequences,
        "resident_bytes": step.resident_bytes,
        "budget_bytes": budget,
        "kept_bytes": layers * step.parts.options[0].saved_bytes,
        "kept_by_formula_bytes": round(known.kept_bytes),
        "keeping_all_bytes": peak_of(memory, [0] * layers),
        "keeping_all_by_formula_bytes": round(known.keeping_all_bytes),
        "smallest_budget_bytes": smallest_budget(memory),
        "smallest_budget_by_formula_bytes": round(known.smallest_bytes),
        "planned_peak_bytes": "",
        "extra_computing": "",
        "extra_time": "",
        "extra_in_proportion": "",
        "checkpoint_extra_time": "",
        "layers_recomputing": "",
        "forward_ms": round(forward, 2),
        "forward_by_formula_ms": round(step.ms_by_formula[0], 2),
        "gather_ms": round(gather, 2),
        "backward_ms": round(backward, 2),
        "backward_by_formula_ms": round(step.ms_by_formula[1], 2),
        "backward_links_ms": round(links, 2),
    }
    if found:
        plain_ms = step.seen_ms([0.0] * layers)
        row["planned_peak_bytes"] = chosen.peak_bytes
        row["extra_computing"] = round(step.device.ms(sum(again)) / step.computing_ms(), 4)
        row["extra_time"] = round(step.seen_ms(again) / plain_ms - 1, 4)
        keeping_all, least = peak_of(memory, [0] * layers), smallest_budget(memory)
        freed = (keeping_all - chosen.peak_bytes) / (keeping_all - least)
        row["extra_in_proportion"] = round(freed * every / step.computing_ms(), 4)
        checkpointed_ms = step.seen_ms([step.parts.forward] * layers)
        row["checkpoint_extra_time"] = round(checkpointed_ms / plain_ms - 1, 4)
        row["layers_recomputing"] = sum(1 for more in again if more > 0)
    row["planning_seconds"] = round(time.process_time() - began, 1)
    return row


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
