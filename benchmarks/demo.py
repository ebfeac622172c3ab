"""Train two networks twice each, plain and through Rockmate in half to two thirds of the memory.

The memory is that of whole steps, as one says it of a card: parameters, gradients, optimizer, batch
and activations.

Both trainings of a network start from equal parameters and equal random state, see the same
batches, and take their steps in turn, so that losses stand side by side and times are comparable.
The first network is a GPT-2 on the bytes of Python's standard library, the second a ResNet with
BatchNorm and in-place ReLU that tells pictures of source, bytecode and compressed bytecode apart.

    $ make demo
    $ .venv/bin/python benchmarks/demo.py --device cuda --steps 50

Exits with an error when a bit differs or a step takes more than its memory.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import data, meter
from harness.meter import MemoryTrace, RandomState, in_mib
from models.GPT import GPT2WithLoss
from models.loss import WithLoss
from models.resnet import resnet50
from rockmate import Rockmate

TRACED = (2, 3, 4)  # steps whose memory is traced; the others but the first are timed
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A network with its loss inside, what it is trained on, how, and in which memory."""

    name: str
    title: str
    make_model: Callable[[], nn.Module]
    batches: list[Batch]
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    memory: str


@dataclass(frozen=True)
class Comparison:
    """What one network's two trainings gave."""

    task: Task
    identical: bool
    memory_bytes: int
    predicted_bytes: int
    plain: MemoryTrace  # of whole steps, with all that is there between two
    ours: MemoryTrace
    planned_overhead: float  # percent of a plain step
    measured_overhead: float
    plain_ms: float  # the median of steps that nothing watches
    planning_seconds: float

    def curves(self) -> Iterator[tuple[MemoryTrace, float]]:
        """Yield both traces, each with the time of a step: watching it makes it longer."""
        yield self.plain, self.plain_ms
        yield self.ours, self.plain_ms * (1 + self.measured_overhead / 100)

    @property
    def kept_promise(self) -> bool:
        """Same bits, within the memory."""
        return self.identical and self.ours.peak_bytes <= self.memory_bytes

    def row(self) -> dict[str, object]:
        """Return the figures under their names, for a CSV file."""
        return {
            "network": self.task.title,
            "results": "identical" if self.identical else "DIFFERENT",
            "plain_peak_bytes": self.plain.peak_bytes,
            "memory_bytes": self.memory_bytes,
            "predicted_peak_bytes": self.predicted_bytes,
            "measured_peak_bytes": self.ours.peak_bytes,
            "planned_overhead_percent": f"{self.planned_overhead:.2f}",
            "measured_overhead_percent": f"{self.measured_overhead:.2f}",
            "planning_seconds": f"{self.planning_seconds:.2f}",
        }


class Training:
    """A network in training, with its own stream of random numbers."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, random: RandomState
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.random = random
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self.memory = MemoryTrace((), (), 0)

    def step(self, batch: Batch, *, trace: bool = False) -> None:
        """Take one step; trace its memory or time it, and append the loss."""
        device = batch[0].device
        self.random.restore()
        losses: list[Tensor] = []

        # Before the trace, which does not see the end of what began before.
        self.optimizer.zero_grad()

        def whole_step() -> None:
            loss = self.module(*batch)
            loss.backward()
            losses.append(loss.detach())
            self.optimizer.step()

        if trace:
            there = meter.held_bytes(self.module, self.optimizer, batch)
            memory = meter.trace_memory(whole_step, device)
            # The bytes are the same each time; the fastest step draws the clearest picture.
            if not self.memory.times_ms or memory.times_ms[-1] < self.memory.times_ms[-1]:
                held = tuple(there + size_bytes for size_bytes in memory.held_bytes)
                self.memory = MemoryTrace(memory.times_ms, held, there + memory.peak_bytes)
        else:
            self.step_ms.append(meter.timed_ms(whole_step, device))
        self.losses.append(losses[0].item())
        self.random = RandomState.now()


def tasks(device: torch.device, steps: int) -> list[Task]:
    """Return the two networks, at sizes that a laptop trains."""

    def to_device(batches: list[Batch]) -> list[Batch]:
        return [(x.to(device), y.to(device)) for x, y in batches]

    return [
        Task(
            "gpt2",
            "GPT-2, 12 layers, dropout 0.1, tied embedding",
            lambda: GPT2WithLoss(12, 0.1, d_model=192, n_heads=6, vocab=256, max_length=128),
            to_device(data.text_batches(steps, batch=8, length=128)),
            lambda parameters: torch.optim.AdamW(parameters, lr=6e-4),
            "180MB",
        ),
        Task(
            "resnet50",
            "ResNet-50, BatchNorm, in-place ReLU",
            lambda: WithLoss(resnet50(width=32, num_classes=3)),
            to_device(data.image_batches(steps, batch=16, size=96)),
            lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
            "120MB",
        ),
    ]


def run(task: Task, device: torch.device) -> Comparison:
    """Plan, train both ways step by step, and print what happens."""
    print(f"\n{task.title}", flush=True)
    torch.manual_seed(0)
    plain_model = task.make_model().to(device)
    our_model = copy.deepcopy(plain_model)
    start = RandomState.now()
    optimizer = task.make_optimizer(our_model.parameters())
    planned = Rockmate(
        *(our_model, task.batches[0]),
        memory=task.memory,
        optimizer=optimizer,
        progress=True,
        cache=False,
    )
    memory = planned.memory
    print(f"\n{planned.plan}\n\n{memory}\n")
    phases = planned.planning_seconds
    print("planning: " + ", ".join(f"{name} {took:.1f} s" for name, took in phases.items()))

    plain = Training(plain_model, task.make_optimizer(plain_model.parameters()), start)
    ours = Training(planned, optimizer, start)
    print("\n  step  loss, plain     loss, Rockmate")
    for number, batch in enumerate(task.batches, start=1):
        for training in (plain, ours):
            training.step(batch, trace=number in TRACED)
        one, other = plain.losses[-1], ours.losses[-1]
        word = "same bits" if one.hex() == other.hex() else f"DIFFERENT: {one.hex()} {other.hex()}"
        print(f"  {number:4}  {one:<14.9f}  {other:<14.9f}  {word}", flush=True)

    difference = meter.first_difference(plain_model, our_model)
    if difference is None and not plain.random.equals(ours.random):
        difference = "the random state"
    identical = difference is None and [x.hex() for x in plain.losses] == [
        x.hex() for x in ours.losses
    ]
    outcome = Comparison(
        task,
        identical,
        memory.asked_bytes,
        memory.resident_bytes + max(planned.plan.peak_bytes, memory.stepping_bytes),
        plain.memory,
        ours.memory,
        planned.plan.overhead_percent,
        100 * (median_ratio(ours.step_ms, plain.step_ms) - 1),
        statistics.median(plain.step_ms[1:]),
        sum(phases.values()),
    )
    print(
        f"  parameters, gradients, buffers and random state after {len(task.batches)} steps: "
        + ("same bits" if difference is None else f"DIFFERENT in {difference}")
        + "\n\n  memory of a whole step: parameters, gradients, optimizer, batch and activations"
        f"\n    plain      {in_mib(plain.memory.peak_bytes):>12}  measured"
        f"\n    memory     {in_mib(outcome.memory_bytes):>12}  asked"
        f"\n    Rockmate   {in_mib(outcome.predicted_bytes):>12}  predicted"
        f"\n               {in_mib(ours.memory.peak_bytes):>12}  measured"
        + ("" if ours.memory.peak_bytes <= outcome.memory_bytes else "  TOO MUCH")
        + "\n  time of one step over a plain one"
        f"\n               {outcome.planned_overhead:>+10.1f} %  planned"
        f"\n               {outcome.measured_overhead:>+10.1f} %  measured, median of paired steps",
        flush=True,
    )
    return outcome


def median_ratio(ours_ms: list[float], plain_ms: list[float]) -> float:
    """Return the median ratio of paired steps, the first pair left out."""
    pairs = list(zip(ours_ms, plain_ms, strict=True))[1:]
    return statistics.median(ours / plain for ours, plain in pairs)


def draw(outcomes: list[Comparison], path: Path) -> None:
    """Draw all memory over one step of each network, plain and Rockmate, with what was asked."""
    import matplotlib as mpl  # only the picture needs it

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(outcomes), figsize=(5.2 * len(outcomes), 3.7), layout="constrained", squeeze=False
    )
    for panel, outcome in zip(panels[0], outcomes, strict=True):
        looks = (("plain", "0.55"), ("Rockmate", "tab:blue"))
        for (trace, step_ms), (label, color) in zip(outcome.curves(), looks, strict=True):
            held = [held / meter.MIB for held in trace.held_bytes]
            spots = [step_ms * spot / trace.times_ms[-1] for spot in trace.times_ms]
            panel.step(spots, held, where="post", color=color, lw=1.1, label=label)
            panel.fill_between(spots, held, step="post", color=color, alpha=0.12, lw=0)
        memory = outcome.memory_bytes / meter.MIB
        label = f"memory={outcome.task.memory!r}"
        panel.axhline(memory, color="tab:red", ls="--", lw=1.2, label=label)
        panel.set_title(outcome.task.title, fontsize=10)
        panel.set_xlabel("time in the step (ms)")
        panel.set_ylim(0, 1.08 * outcome.plain.peak_bytes / meter.MIB)
        panel.set_xlim(left=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(  # under the axes: curves reach every corner
            loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, frameon=False, fontsize=9
        )
    panels[0][0].set_ylabel("MiB in all: parameters, gradients,\noptimizer, batch, activations")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def table(outcomes: list[Comparison], environment: dict[str, str]) -> str:
    """Return the results as a Markdown table, with a line on where they were measured."""
    header = [
        "network",
        "plain step",
        "`memory=`",
        "predicted",
        "measured",
        "extra time, planned",
        "measured",
        "losses, gradients, parameters",
        "planning",
    ]
    rows = [
        [
            outcome.task.title,
            in_mib(outcome.plain.peak_bytes),
            f"{outcome.task.memory}, {in_mib(outcome.memory_bytes)}",
            in_mib(outcome.predicted_bytes),
            in_mib(outcome.ours.peak_bytes),
            f"{outcome.planned_overhead:.1f} %",
            f"{outcome.measured_overhead:.1f} %",
            "same bits" if outcome.identical else "DIFFERENT",
            f"{outcome.planning_seconds:.1f} s",
        ]
        for outcome in outcomes
    ]
    steps = len(outcomes[0].task.batches)
    note = f"{steps} steps each; " + ", ".join(
        f"{key} {value}" for key, value in environment.items()
    )
    return f"{meter.markdown_table(header, rows)}\n{note}.\n"


def main() -> int:
    """Run both networks and write the table and the picture; return 1 if a promise broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--steps", default=16, type=int, help="training steps of each network")
    parser.add_argument("--only", choices=["gpt2", "resnet50"])
    parser.add_argument("--out", default=meter.RESULTS / "latest", type=Path)
    options = parser.parse_args()
    if options.steps <= max(TRACED):
        parser.error(f"--steps {options.steps}: at least {max(TRACED) + 1} are needed to time any")

    chosen = [
        task for task in tasks(options.device, options.steps) if options.only in (None, task.name)
    ]
    outcomes = [run(task, options.device) for task in chosen]
    environment = meter.environment(options.device)
    text = table(outcomes, environment)
    meter.write_csv(options.out / "demo.csv", [{**o.row(), **environment} for o in outcomes])
    (options.out / "demo.md").write_text(text, encoding="utf-8")
    draw(outcomes, options.out / "demo.png")
    print(f"\n{text}\nTable and picture: {options.out}/demo.md, demo.csv, demo.png")
    broken = [outcome.task.name for outcome in outcomes if not outcome.kept_promise]
    if broken:
        print(f"demo: not as promised: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
