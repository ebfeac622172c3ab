"""Measure one checkout for `step.py`: the packages come from PYTHONPATH, this code does not.

Requests and replies are lines of JSON. `{"subject": {…}, "smoke": false, "checkout": "…"}` forks a
child, which builds the network, plans it and replies what it prepared; `{"do": "turn", "seconds":
1.0}` is a round of steps, `{"do": "profile"}` a profile, `{"do": "close"}` ends the child. Between
rounds the child waits, so that two checkouts can take turns.

All times are CPU time of the process, of one thread: what another process does on the machine is
not in them. Only the public interface of Rockmate is used.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

# What planning imports deep inside torch: once, and not for every subject.
PRELOAD = (
    *("torch._dynamo", "torch.export", "torch.profiler", "torch.utils.flop_counter"),
    *("torch.utils.checkpoint", "ortools.sat.python.cp_model"),
)
TakeStep = Callable[[], None]
Reply = dict[str, Any]
WARMUP = 3  # turns of which the first allocates gradients and fills caches
FEWEST, MOST = 3, 300  # pairs of steps in one round
PROFILED = 25  # functions shown
REPEATS, LOOKS = 20, 200  # of guards


@dataclass
class Prepared:
    """The steps that are compared in one process, "plain" among them, and what is known of each."""

    steps: dict[str, TakeStep] = field(default_factory=dict)
    facts: dict[str, Reply] = field(default_factory=dict)  # status, message, columns of the row
    number: int = 0  # turns taken so far

    def add(self, name: str, make: Callable[[Reply], TakeStep]) -> Reply:
        """Prepare one contender; whatever happens, there is an answer for its row."""
        facts: Reply = {"status": "ok", "message": ""}
        self.facts[name] = facts
        try:
            step = make(facts)
            for _ in range(WARMUP):
                step()
            self.steps[name] = step
        except Exception as error:
            traceback.print_exc()
            facts |= {"status": status_of(error), "message": f"{type(error).__name__}: {error}"}
        return facts

    def turn(self) -> dict[str, float]:
        """Take one step of each, in an order that rotates; return CPU milliseconds."""
        names = list(self.steps)
        first = self.number % len(names)
        self.number += 1
        took = {}
        for name in names[first:] + names[:first]:
            step = self.steps[name]
            begin = time.process_time()
            step()
            took[name] = 1e3 * (time.process_time() - begin)
        return took

    def round(self, seconds: float) -> dict[str, list[float]]:
        """Take turns for about so many seconds of CPU time; 0 is the fewest turns."""
        trial = sum(self.turn().values()) / 1e3  # also wakes up after the other checkout's round
        count = min(MOST, max(FEWEST, round(seconds / trial))) if seconds else FEWEST
        turns = [self.turn() for _ in range(count)]
        return {name: [turn[name] for turn in turns] for name in self.steps}


def status_of(error: Exception) -> str:
    """Return how a contender ended, in the words of the experiments."""
    names = [cls.__name__ for cls in type(error).__mro__]
    if "InfeasibleBudgetError" in names:
        return "infeasible"
    if "SelfTestError" in names:
        return "failed"
    return "refused" if {"RockmateError", "RkgbError"} & set(names) else "failed"


# ------------------------------------------------------------------ contenders


def train(model: Any, sample: tuple[Any, ...]) -> None:
    """Run one training step without an optimizer."""
    model.zero_grad(set_to_none=True)
    out = model(*sample)
    (out.square().mean() if out.dim() else out).backward()


def plain(case: Any, facts: Reply) -> TakeStep:
    """PyTorch as it is."""
    return functools.partial(train, case.model, case.sample)


def checkpointed(case: Any, facts: Reply) -> TakeStep:
    """`torch.utils.checkpoint` around every layer."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from harness import meter

    model = copy.deepcopy(case.model)
    for layer in case.layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    step = functools.partial(train, model, case.sample)
    step()

    def resident() -> None:  # a budget leaves the gradients of parameters out
        out = model(*case.sample)
        out.square().mean().backward()

    facts["peak_bytes"] = meter.trace_memory(resident, torch.device("cpu")).peak_bytes
    facts["flops_ratio"] = flops(step) / flops(plain(case, {}))
    return step


def planned(
    case: Any, budget: float, facts: Reply, *, planner: str = "auto", exactly: bool = False
) -> TakeStep:
    """Rockmate within a fraction of the plain peak, or within bytes.

    A self-test that fails is noted, and the module measured without it. Where nothing fits, the
    least budget that does is taken and noted, unless the budget must be kept exactly.
    """
    from rockmate import InfeasibleBudgetError, Rockmate, SelfTestError

    def make(budget: float, self_test: bool = True) -> Any:
        model = copy.deepcopy(case.model)
        return Rockmate(model, case.sample, budget, planner=planner, self_test=self_test)

    def tested(budget: float) -> Any:
        try:
            return make(budget)
        except SelfTestError as error:
            facts["self_test"] = f"failed: {' '.join(str(error).split())[:200]}"
            return make(budget, self_test=False)

    try:
        module = tested(budget)
    except InfeasibleBudgetError as error:
        if exactly:
            raise
        facts["least_budget"] = "yes"
        facts["message"] = f"{error.asked_bytes} bytes are too few: {error.minimum_bytes} taken"
        budget = error.minimum_bytes
        module = tested(budget)
    step = functools.partial(train, module, case.sample)
    step()
    facts |= {
        "guards_us": guards_us(module),
        "planned_overhead_percent": 100 * module.plan.overhead,
        "peak_bytes": module.plan.peak_bytes,
        "budget_bytes": module.budget_bytes,
        "capture_seconds": module.planning_seconds.get("capture"),
        "plan_seconds": sum(module.planning_seconds.values()),
    }
    if module.plan.overhead:
        facts["flops_ratio"] = flops(step) / flops(plain(case, {}))
    return step


def guards_us(module: Any) -> float | None:
    """Return what one look at all that a plan takes for granted of its module costs.

    It is the least of many, as it is a part of every step; None in an older checkout.
    """
    try:
        watch = object.__getattribute__(module, "_rockmate").watch
    except AttributeError:
        return None
    least = float("inf")
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(LOOKS):
            watch.now(None)  # in no region of autocast
        least = min(least, (time.process_time() - begin) / LOOKS)
    return 1e6 * least


def flops(step: TakeStep) -> int:
    """Count the FLOPs of one step as they are executed."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


# ------------------------------------------------------------------ kinds of subjects


def prepare(subject: Any, smoke: bool) -> Prepared:
    """Build a subject and plan it."""
    from steps.cases import build

    case = build(subject, smoke)
    found = Prepared()
    found.add("plain", lambda facts: plain(case, facts))
    if subject.kind != "recomputed":
        exactly = subject.kind == "planned"  # its extra time is of that budget
        found.add("rockmate", lambda facts: planned(case, subject.budget, facts, exactly=exactly))
        return found
    peak = found.add("checkpoint", lambda facts: checkpointed(case, facts)).get("peak_bytes", 0)
    found.add("rockmate", lambda facts: planned(case, peak, facts))
    name = "recompute_all"
    found.add(f"rockmate {name}", lambda facts: planned(case, peak, facts, planner=name))
    return found


def capture(subject: Any, smoke: bool) -> dict[str, list[float]]:
    """Plan a network that this process has not seen, and return seconds of capture and of all.

    The phases are timed with `time.perf_counter`, which is the CPU clock meanwhile. Another, tiny
    network comes first: imports are no part of a capture.
    """
    import torch

    from rockmate import Rockmate
    from steps.cases import build

    small = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    Rockmate(small, torch.randn(2, 4), 1.0, self_test=False)
    case = build(subject, smoke)
    with mock.patch.object(time, "perf_counter", time.process_time):
        module = Rockmate(case.model, case.sample, 1.0, cost="flops", self_test=False)
    seconds = module.planning_seconds
    return {"capture_seconds": [seconds["capture"]], "plan_seconds": [sum(seconds.values())]}


def profiled(found: Prepared, least_s: float = 2.0) -> str:
    """Return where a planned step spends its time, by function, and its time without a profiler."""
    import cProfile
    import pstats

    times = found.round(least_s / 2)
    lines = [f"{name}: {statistics.median(t):.3f} ms of CPU a step" for name, t in times.items()]
    for name in found.steps:
        if not name.startswith("rockmate"):
            continue
        step, step_s = found.steps[name], statistics.median(times[name]) / 1e3
        count = max(3, round(least_s / step_s))
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            step()
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILED)
        lines.append(f"\n{name}, {count} steps\n{text.getvalue().strip()}")
    return "\n".join(lines)


# ------------------------------------------------------------------ serving


def serve() -> None:
    """Answer until standard input ends; only JSON goes to standard output."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    problem = preload(os.environ["STEP_CHECKOUT"])
    for line in sys.stdin:
        request = json.loads(line)
        if problem:
            say(replies, {"status": "failed", "message": problem})
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside idle BLAS threads
            pid = os.fork()
        if pid == 0:
            child(request, replies)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            died = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            say(replies, {"status": "failed", "message": died, "died": True})


def preload(checkout: str) -> str:
    """Import what is measured; say what is wrong where it does not come from the checkout."""
    try:
        import torch

        torch.set_num_threads(1)
        import rkgb
        import rockmate
        import rotor

        for name in PRELOAD:
            importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for package in (rkgb, rockmate, rotor):
        place = Path(package.__file__ or "").resolve()
        if not place.is_relative_to(Path(checkout).resolve()):
            return f"{package.__name__} is {place.parent}, which is not in the checkout to measure"
    return ""


def say(replies: TextIO, reply: Mapping[str, Any]) -> None:
    """Write one line."""
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def child(request: Reply, replies: TextIO) -> None:
    """Prepare a subject, reply, and take requests for it until told to close."""
    code = 1
    try:
        from steps.cases import Subject

        subject, smoke = Subject(**request["subject"]), request["smoke"]
        if subject.kind == "capture":
            say(replies, {"status": "ok", "times": capture(subject, smoke)})
        else:
            found = prepare(subject, smoke)
            say(replies, {"status": "ok", "contenders": found.facts})
            for line in sys.stdin:
                asked = json.loads(line)
                if asked["do"] == "close":
                    say(replies, {"status": "ok"})  # nothing is sent before this is read
                    break
                if asked["do"] == "profile":
                    say(replies, {"status": "ok", "text": profiled(found)})
                else:
                    say(replies, {"status": "ok", "times": found.round(asked["seconds"])})
        code = 0
    except Exception as error:
        traceback.print_exc()
        say(replies, {"status": status_of(error), "message": f"{type(error).__name__}: {error}"})
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
