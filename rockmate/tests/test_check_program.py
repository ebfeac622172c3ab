"""The checker refuses exactly the programs that the executor, run strictly, cannot run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from rkgb.basic import bind_inputs, external_values
from rockmate import InvalidPlanError, Rockmate
from rockmate.check_program import check_program
from rockmate.errors import SelfTestError
from rockmate.execute import Executor
from rockmate.pipeline import Planned
from rockmate.program import Instruction, Program, lower
from rockmate.reference import Step as ReferenceStep
from rockmate.reference import compare, run_step, twin_of
from rockmate.steps import Step
from rockmate.testing_nets import network

CPU = torch.device("cpu")
KINDS = ["drop", "duplicate", "swap", "free early", "nothing"]
_cache: dict[str, tuple[nn.Module, Any, Planned, ReferenceStep]] = {}


def planned(name: str) -> tuple[nn.Module, Any, Planned, ReferenceStep]:
    if name not in _cache:
        model, sample = network(name)
        wrapped = Rockmate(model, sample, "1GiB", cost="flops", self_test=False)
        args, kwargs = bind_inputs(sample)
        twin = twin_of(model)
        torch.manual_seed(7)
        eager = run_step(twin, twin, args, kwargs, CPU)
        _cache[name] = model, sample, vars(wrapped)["_plans"][0], eager
    return _cache[name]


def some_program(planned: Planned, source: random.Random) -> Program:
    problem = planned.calibration.problem
    count = len(problem.nodes)
    steps = [Step("F", k) for k in range(count)]
    for node in problem.backward_order:
        steps += [Step("F", k) for k in range(count) if source.random() < 0.15]
        steps.append(Step("B", node))
    return lower(problem, steps)


def mutated(program: Program, kind: str, source: random.Random) -> Program:
    instructions = list(program.instructions)
    place = source.randrange(len(instructions))
    length = program.forward_length
    if kind == "drop":
        del instructions[place]
        length -= place < length
    elif kind == "duplicate":
        instructions.insert(place, instructions[place])
        length += place < length
    elif kind == "swap":
        other = min(place + 1, len(instructions) - 1)
        instructions[place], instructions[other] = instructions[other], instructions[place]
    elif kind == "free early":
        freeing = [t for t, i in enumerate(instructions) if i.frees and t > 0]
        place = source.choice(freeing)
        moved = source.choice(instructions[place].frees)
        rest = tuple(s for s in instructions[place].frees if s != moved)
        instructions[place] = replace(instructions[place], frees=rest)
        before = source.randrange(max(0, place - 8), place)
        old: Instruction = instructions[before]
        instructions[before] = replace(old, frees=(*old.frees, moved))
    return Program(tuple(instructions), length)


def runs(name: str, program: Program) -> bool:
    """Run strictly: any error, or any bit that is not eager's, means that it cannot be run."""
    model, sample, plan, eager = planned(name)
    executor = Executor(
        plan.executor.runner, plan.calibration.problem, program, plan.calibration.layout
    )
    args, kwargs = bind_inputs(sample)
    twin = twin_of(model)

    def call(*call_args: Any) -> Any:
        leaves = tuple(pytree.tree_leaves((call_args, {})))
        return executor(external_values(plan.graph.dataflow.basic, twin, leaves))

    torch.manual_seed(7)
    try:
        compare(eager, run_step(call, twin, args, kwargs, CPU), name)
    except (KeyError, IndexError, InvalidPlanError, SelfTestError):
        return False
    return True


def accepted(name: str, program: Program) -> bool:
    try:
        check_program(planned(name)[2].calibration.problem, program)
    except InvalidPlanError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(["tied", "lstm", "mixer"]), seed=st.integers(0, 2**32))
@example(name="lstm", seed=0)
@example(name="lstm", seed=12)  # the last backward twice
def test_accepts_what_runs_and_nothing_else(kind: str, name: str, seed: int) -> None:
    source = random.Random(seed)
    program = mutated(some_program(planned(name)[2], source), kind, source)
    verdict = accepted(name, program)
    if kind == "nothing":
        assert verdict
    assert verdict == runs(name, program)


def test_both_verdicts_occur() -> None:
    """The property above is not empty: mutations are both refused and accepted."""
    seen = set()
    for seed in range(40):
        source = random.Random(seed)
        program = mutated(some_program(planned("mixer")[2], source), KINDS[seed % 4], source)
        seen.add(accepted("mixer", program))
    assert seen == {True, False}
