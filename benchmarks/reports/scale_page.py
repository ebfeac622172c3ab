"""The page of the documentation about large models: rows of `scale.py`, beside formulas."""

from __future__ import annotations

from collections.abc import Sequence

from models.llama_formulas import GATHERED, GIB, STATE_BYTES, UNREDUCED, Device
from models.llama_rank import Llama


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
        "| model | ranks, share, sequences | computed again | in proportion | extra time | "
        "by checkpoint | forward | backward |",
        f"| --- | --- {'| ---: ' * 4}| --- | --- |",
    ]
    for row in rows:
        names = ("extra_computing", "extra_in_proportion", "extra_time", "checkpoint_extra_time")
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


def formula_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return what the recording of a layer gives, each figure beside its formula."""
    names = (
        "kept_bytes",
        "keeping_all_bytes",
        "smallest_budget_bytes",
        "forward_ms",
        "backward_ms",
    )
    lines = [
        "| model | share, sequences | kept | keeping all | smallest | forward | backward |",
        f"| --- | --- {'| ---: ' * len(names)}|",
    ]
    seen = {tuple(row[n] for n in ("model", "tensor", "sequences")): row for row in rows}
    for (model, tensor, sequences), row in seen.items():
        told = [f"{model}", f"{tensor}, {sequences}"]
        for name in names:
            stem, unit = name.rsplit("_", 1)
            found, formula = (
                float(str(row[n])) / (GIB if unit == "bytes" else 1)
                for n in (name, f"{stem}_by_formula_{unit}")
            )
            told.append(f"{found:.1f} ({formula:.1f}) {'GiB' if unit == 'bytes' else 'ms'}")
        lines.append(f"| {' | '.join(told)} |")
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

* **Resident**: {STATE_BYTES} bytes of each parameter (float32: itself, its gradient, two moments)
  over all ranks, and {device.reserve_bytes / GIB:.0f} GiB for CUDA's context, NCCL's buffers and
  workspaces.
* **Left** is the rest of {device.memory_bytes / GIB:.0f} GiB. The columns after it count
  activations, and what FSDP2 has gathered and not yet reduced: {GATHERED} layers in bfloat16 (the
  one that runs and the next one). The backward holds {UNREDUCED} times a layer more: its gradients
  in bfloat16, and their copy in float32 that is being summed.

## Time

{chr(10).join(time_table(rows))}

* **Computed again** is a share of the computing of a plain step. **In proportion** it would be
  f / (f + b) times the share of the bytes that is let go, (keeping all - planned) /
  (keeping all - smallest): a plan lets go first of what costs least for its bytes.
* **Extra time** is what a user would see. Where a layer waits for links, what is computed again
  meanwhile costs nothing.
* **By checkpoint** is the extra time if every layer is computed again, which is the usual choice.
  With f and b for the computing of a layer, and links g and 3 g, a layer takes
  max(f, g) + max(b, 3 g), and then max(f, g) + max(b + f, 3 g). The head takes its time once.
* **Forward, backward**: what a layer waits for, how long its computing takes (f, b), and how long
  links take meanwhile. They gather the next layer: g is 2 p / t bytes, without the share that is
  there, at the rate of a rank. In the backward they also sum up the gradients of the layer before,
  in float32.

## Each figure by a formula

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

* **Kept**: together that is ((8 + 4 g/a + 8 i/h) / t + 4) s·b·h. For 64 heads, 8 groups and
  i = 3.5 h it is 40.5 s·b·h with t = 1. A layer that is computed again as a whole keeps its input,
  2 s·b·h / t.
* **Keeping all** is what all layers keep, and what is there where the backward begins, which is
  the peak: 12 s·b·v / t for the logits of v words (in bfloat16, in float32, their probabilities,
  a gradient), 2 s·b·h (1 + 1/t) around the head, 8 v·h / t of the head (gathered, a gradient, its
  copy in float32), and 2 p / t of the next layer with p parameters. Or the peak is in the backward
  of a layer: 10 p / t and 2 s·b·h / t. **Smallest** is the same with 2 s·b·h / t for each layer,
  and then with what one layer keeps.
* **Forward**: 2 b·s·p / t FLOPs, and 2 b·s·s·h / t for causal attention. Each operation reads its
  arguments and writes its results: s·b·h (14 + c + (28 + c + 8 g/a + 16 i/h) / t) + 2 p / t bytes,
  with c = 8 for collectives if t > 1. Links of the group: 8 s·b·h (t - 1) / t bytes.
* **Backward**: 4 b·s·p / t and 5 b·s·s·h / t FLOPs,
  s·b·h (46 + c + (40 + c + 16 g/a + 30 i/h) / t) + 4 p / t bytes, and links as in the forward.

As recorded, and in brackets by these formulas:

{chr(10).join(formula_table(rows))}

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
