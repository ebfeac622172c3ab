"""A Llama of 70 layers on 8, 64 and 512 ranks, planned layer by layer without any of them.

    $ .venv/bin/python benchmarks/scale.py            # benchmarks/results/scale.csv, docs/scale.md
    $ .venv/bin/python benchmarks/scale.py --record   # first measure a layer's operations here
    $ .venv/bin/python benchmarks/scale.py --smoke    # tiny, to see that it runs

One layer is recorded by sizes on the device `meta` and gets its options; the options of all layers
are chosen together, as `apply_to_blocks` does, within what is left of a device's memory on a rank.
What FSDP2 does is a model, written in `Ranks`: every layer is sharded with reshard_after_forward,
the next one is gathered while one runs, and gradients are reduced while the next ones are made.

Times are costs that were recorded: `--record` runs every kind of operation of a layer of the real
widths, on fewer tokens, on the device that is there. Each is taken in proportion to the FLOPs and
bytes of the same operation on all tokens, and all together in proportion to `Rates`, which say how
much faster a rank is than that device.
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

import rkgb
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
RECORDED = RESULTS / "scale_costs.json"
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
class Rates:
    """How fast a rank computes, and its links; both are assumed."""

    flops_per_ms: float = 5e11
    link_bytes_per_ms: float = 5e7

    def __str__(self) -> str:
        return (
            f"{self.flops_per_ms / 1e9:g} TFLOP/s in the operations of a layer, all together, and "
            f"{self.link_bytes_per_ms / 1e6:g} GB/s to and from every rank"
        )


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
class Recorded:
    """Costs of the kinds of operation of a layer and of what comes after the layers."""

    tokens: int  # on which they were recorded
    costs: rkgb.RecordedCosts

    @property
    def where(self) -> str:
        return f"{self.costs.device}, torch {self.costs.torch_version}, {self.tokens} tokens"

    def save(self, path: Path) -> None:
        """Write them into a file."""
        path.write_text(json.dumps({"tokens": self.tokens, **json.loads(self.costs.to_json())}))

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read what `save` wrote."""
        rows = json.loads(path.read_text())
        return cls(rows.pop("tokens"), rkgb.RecordedCosts.from_json(json.dumps(rows)))


def record(size: Size, tokens: int, cost: str = "measured") -> Recorded:
    """Run every kind of operation of a layer and of the ends on some tokens, on the device here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[rkgb.RecordedCosts] = []
    for kind in (Layer, Ends):
        with device:
            module, sample = kind(size).bfloat16(), sample_of(kind, size, tokens)
        found.append(rkgb.make_all_graphs(module, sample, cost=cost).costs)  # type: ignore[arg-type]
        del module, sample
    both = {**found[0].costs, **found[1].costs}
    return Recorded(tokens, replace(found[0], costs=both, device=_named(device)))


def _named(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or ['a CPU'])[0]}, {torch.get_num_threads()} thread(s)"


def sample_of(kind: type[nn.Module], size: Size, tokens: int) -> tuple[Tensor, ...]:
    """Return what a part of the network is called with, on the device of the context."""
    x = torch.randn(1, tokens, size.width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, tokens, dtype=torch.long)
    return (x,) if kind is Layer else (x, targets)


@dataclass(frozen=True)
class Parts:
    """Facts about the parts of the network on one rank."""

    options: tuple[BlockOption, ...]
    layer_bytes: int  # of a layer's parameters in bfloat16
    layer_ms: float
    end_bytes: int  # of the head's parameters, and of the embedding's
    end_peak_bytes: int
    end_ms: float
    output_bytes: int  # of a layer
    parameters: int
    forward_ms: float  # of a layer
    times_faster: float  # a rank than what the costs were recorded on


def parts_of(size: Size, recorded: Recorded, rates: Rates) -> Parts:
    """Record a layer and the head by sizes, and find the layer's options."""
    with torch.device("meta"):
        layer, ends = Layer(size).bfloat16(), Ends(size).bfloat16()
        x = sample_of(Layer, size, size.tokens)[0]
    of_layer, layer_problem = timed(Layer, size, recorded)
    of_end, end_problem = timed(Ends, size, recorded)
    work_ms = of_layer.problem.base_time_ms * 1e9 / rates.flops_per_ms
    pace = work_ms / layer_problem.base_time_ms
    problem, end_problem = paced(layer_problem, pace), paced(end_problem, pace)
    return Parts(
        options=module_options(problem),
        layer_bytes=of_layer.parameters_bytes,
        layer_ms=problem.base_time_ms,
        end_bytes=of_end.parameters_bytes,
        end_peak_bytes=of_end.activations_bytes,
        end_ms=end_problem.base_time_ms,
        output_bytes=x.nbytes,
        parameters=size.layers * _count(layer) + _count(ends) + size.vocab * size.width,
        forward_ms=sum(node.fwd_time_ms for node in problem.nodes),
        times_faster=1 / pace,
    )


def timed(
    kind: type[nn.Module], size: Size, recorded: Recorded
) -> tuple[rockmate.Estimate, Problem]:
    """Return a part by sizes, and its problem with recorded times, in proportion to all tokens.

    The estimates count FLOPs, and bytes with a small weight: one for the tokens of the recording,
    one for those of a step. What an operation took is scaled by what it has more to do.
    """
    with torch.device("meta"):
        module = kind(size).bfloat16()
        few, many = (sample_of(kind, size, n) for n in (recorded.tokens, size.tokens))
    whole = rockmate.estimate(module, many)
    then = rockmate.estimate(module, few)
    took = rockmate.estimate(module, few, cost=recorded.costs)
    rows = zip(whole.problem.nodes, then.problem.nodes, took.problem.nodes, strict=True)
    nodes = tuple(
        replace(
            node,
            fwd_time_ms=real.fwd_time_ms * _share(node.fwd_time_ms, small.fwd_time_ms),
            bwd_time_ms=real.bwd_time_ms * _share(node.bwd_time_ms, small.bwd_time_ms),
        )
        for node, small, real in rows
    )
    return whole, replace(whole.problem, nodes=nodes)


def _share(now: float, then: float) -> float:
    return now / then if then else 0.0


def paced(problem: Problem, pace: float) -> Problem:
    """Return a problem with all times in proportion."""
    nodes = (
        replace(node, fwd_time_ms=pace * node.fwd_time_ms, bwd_time_ms=pace * node.bwd_time_ms)
        for node in problem.nodes
    )
    return replace(problem, nodes=tuple(nodes))


@dataclass(frozen=True)
class Ranks:
    """One step on some ranks: what is resident, gathered and reduced on each."""

    count: int
    size: Size
    parts: Parts
    rates: Rates

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
        return others / self.rates.link_bytes_per_ms

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
        "layer_forward_ms": round(parts.forward_ms, 3),
        "choose_seconds": round(time.perf_counter() - began, 2),
    }


def table(rows: list[dict[str, object]], ranks: Ranks, recorded: Recorded, seconds: float) -> str:
    """Return the page of the documentation; `ranks` are any of those in the rows."""
    size, parts = ranks.size, ranks.parts
    lines = [
        f"# A Llama of {size.layers} layers on many ranks",
        "",
        f"Made by `benchmarks/scale.py`: width {size.width}, {size.heads} heads, {size.groups} "
        f"groups, inner width {size.inner}, {size.tokens} tokens in bfloat16 on each rank, FSDP2 "
        f"on every layer, AdamW in float32, devices of {size.device_bytes / 1e9:.0f} GB. Nothing "
        "was run at this size: a layer was recorded by sizes on the device `meta`, and what FSDP2 "
        "holds is a model.",
        "",
        f"Times are recorded costs ({recorded.where}): every kind of operation of a layer of these "
        "widths was run there, and counts in proportion to the FLOPs and bytes of all tokens. One "
        f"factor for all of them, {parts.times_faster:.0f}, brings them to the rank that is "
        f"assumed, with {ranks.rates}. Extra time does not depend on that factor, but on how long "
        "operations take beside each other, which differs between devices.",
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
        f"Planning all of it took {seconds:.0f} s of one core; a layer has {len(parts.options)} "
        "options.",
    ]
    return "\n".join(lines) + "\n"


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--record", action="store_true", help="measure a layer's operations here")
    parser.add_argument("--tokens", type=int, default=512, help="on which --record runs them")
    options = parser.parse_args()
    size, rates = Size(), Rates()
    if options.smoke:
        size = Size(4, 64, 4, 2, 128, 100, 64, 3 * 10**6)
        recorded = record(size, 16)
    else:
        if options.record:
            record(size, options.tokens).save(RECORDED)
        recorded = Recorded.load(RECORDED)
    began = time.process_time()
    parts = parts_of(size, recorded, rates)
    many = [Ranks(count, size, parts, rates) for count in RANKS]
    rows = [row_of(ranks) for ranks in many]
    seconds = time.process_time() - began
    text = table(rows, many[0], recorded, seconds)
    out = options.out / "latest" / "smoke" if options.smoke else options.out
    out.mkdir(parents=True, exist_ok=True)
    more = {"times": recorded.where, "times_faster": round(parts.times_faster, 1), **asdict(rates)}
    with (out / "scale.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *more])
        writer.writeheader()
        writer.writerows({**row, **more} for row in rows)
    (out / "scale.md" if options.smoke else TABLE).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
