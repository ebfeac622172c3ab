"""Record networks as problems in files, so that solvers can be compared without them.

    $ python -m planning.instances                       # CPU sizes -> instances/*.json
    $ python -m planning.instances --device cuda --size paper

A file holds what the planners are given (nodes, storages, bytes from the executor's calibration,
times), the chain that rotor measured where the network is one, and where all this was measured.
Times are medians of repeated runs, or FLOPs with `--cost flops`, which no machine changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

import rotor
from harness.experiment import BENCHMARKS, refuse_without_cuda, stamp_of
from harness.networks import NETWORKS, case_of
from measures.planning import problem_of
from measures.strategies import sequential
from measures.training import on_device
from rockmate.planning import Problem

INSTANCES = BENCHMARKS / "instances"
FORMAT = "rockmate instance 1"
RECORDED = {
    "smoke": ("gpt2-small",),
    "cpu": (*(n for n in NETWORKS if n not in ("gpt2-medium", "llama")), "gpt2:4", "gpt2:48"),
    "paper": (*(n for n in NETWORKS if n != "llama"), "gpt2:4", "gpt2:48"),
}


@dataclasses.dataclass(frozen=True)
class Instance:
    """A network as the solvers see it."""

    name: str
    size: str
    cost: str  # "measured" or "flops": what the times are
    recorded: dict[str, str]  # device, torch, commit, …
    plain_peak_bytes: int
    problem: Problem
    chain: rotor.Chain | None

    def to_json(self) -> str:
        """Return the instance as text."""
        problem = json.loads(self.problem.to_json())
        for row in problem["nodes"]:
            for name in ("fwd_time_ms", "bwd_time_ms"):
                row[name] = float(f"{row[name]:.6g}")
        chain = None
        if self.chain is not None:
            chain = [dataclasses.asdict(stage) for stage in self.chain.stages]
            chain = [_rounded(stage) for stage in chain]
        head = {
            name: getattr(self, name)
            for name in ("name", "size", "cost", "recorded", "plain_peak_bytes")
        }
        rows = {"format": FORMAT, **head, "problem": problem, "chain": chain}
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Read what `to_json` wrote."""
        rows = json.loads(text)
        if rows.pop("format", None) != FORMAT:
            raise ValueError(f"this is no recorded instance: expected the format {FORMAT!r}")
        problem = Problem.from_json(json.dumps(rows.pop("problem")))
        stages = rows.pop("chain")
        chain = None if stages is None else rotor.Chain(tuple(_stage(s) for s in stages))
        return cls(problem=problem, chain=chain, **rows)


def _rounded(stage: dict[str, Any]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    options = [
        {k: short(v) for k, v in option.items() if k != "key"} for option in stage["options"]
    ]
    return {k: short(v) for k, v in stage.items()} | {"options": options}


def _stage(row: dict[str, Any]) -> rotor.Stage:
    options = tuple(rotor.Option(**option) for option in row["options"])
    return rotor.Stage(**{**row, "options": options})


def record(name: str, size: str, device: str, cost: str, stamp: dict[str, str]) -> Instance:
    """Measure a network and return it as an instance."""
    case = case_of(name, size)
    problem, facts = problem_of(case, device, cost)
    chain = None
    if case.stages is not None:
        ready = on_device(case_of(name, size), torch.device(device))
        module = rotor.Checkpointable(sequential(ready, ready.model))
        module.measure(ready.sample[0])
        chain = module.chain
    kept = {key: stamp[key] for key in ("device", "driver", "torch", "commit", "packages")}
    return Instance(name, size, cost, kept, facts["plain_peak_bytes"], problem, chain)


def load(folder: Path = INSTANCES) -> list[Instance]:
    """Return all recorded instances, by file name."""
    return [
        Instance.from_json(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    ]


def main() -> int:
    """Record, one file for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(RECORDED), default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cost", choices=("measured", "flops"), default="measured")
    parser.add_argument("--out", type=Path, default=INSTANCES)
    parser.add_argument("--only", default="")
    flags = parser.parse_args()
    if flags.device.startswith("cuda"):
        refuse_without_cuda(flags.device)
    flags.out.mkdir(parents=True, exist_ok=True)
    stamp = stamp_of(flags.device)
    for name in RECORDED[flags.size]:
        if flags.only not in name:
            continue
        instance = record(name, flags.size, flags.device, flags.cost, stamp)
        kind = torch.device(flags.device).type
        path = flags.out / f"{name.replace(':', '-')}-{flags.size}-{kind}.json"
        path.write_text(instance.to_json() + "\n", encoding="utf-8")
        nodes = len(instance.problem.nodes)
        print(f"{path.name}: {nodes} nodes, {path.stat().st_size / 1000:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
