"""Every way to train a network in less memory that is compared here, applied to a copy of it.

A strategy gets a case, a setting and the bytes it may use, and returns a callable for one forward.
The setting is a budget for those that take one ("50%" of the plain peak, or bytes), and the name of
a pattern for those that do not ("every 2nd block").
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import rkgb
import rockmate
import rotor
from harness.networks import Case
from harness.worker import Outcome
from measures.by_hand import layer_inputs_moved, saved_tensors_moved
from measures.torch_compile import compile_within, flops_of_graphs
from models.peers_gpt import Block
from rockmate.planning import Plan, Problem

aten = torch.ops.aten
run_again = functools.partial(checkpoint, use_reentrant=False)
OURS = ("rockmate", "rotor", "rockmate-blocks")
EXACT = ("plain", *OURS)  # gradients and buffers must be the plain ones, bit for bit
BUDGETED = (*EXACT, "rockmate-compiled")  # take a budget in bytes


@dataclass(frozen=True)
class Applied:
    """A strategy at work on a model: what a step calls, and what is known beforehand."""

    forward: Callable[[], Tensor]
    plan_seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)  # columns of the row
    flops: Callable[[], int] | None = None  # where counting a step from outside is not possible


def apply(strategy: str, setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """Apply a strategy to `model`, which is changed; `case.sample` is on its device."""
    begin = time.perf_counter()
    try:
        applied = STRATEGIES[strategy](setting, case, model, budget_bytes)
    except (rockmate.InfeasibleBudgetError, rotor.InfeasibleBudgetError) as error:
        found = {"minimum_bytes": error.minimum_bytes, "budget_bytes": budget_bytes}
        raise Outcome("infeasible", str(error), **found) from error
    except (rockmate.SelfTestError, rotor.BackwardError):
        raise
    except (rockmate.RockmateError, rkgb.RkgbError, rotor.RotorError) as error:
        raise Outcome("refused", f"{type(error).__name__}: {error}") from error
    seconds = applied.plan_seconds or time.perf_counter() - begin
    return Applied(applied.forward, seconds, applied.facts, applied.flops)


def plain(setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """PyTorch as it is."""
    return Applied(lambda: model(*case.sample))


def with_rockmate(setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """Rockmate within the bytes; after a blank, the setting may name cost, effort and offload."""
    words = setting.split()[1:]
    chosen = {
        "cost": next((w for w in words if w in ("flops", "measured")), "measured"),
        "effort": next((w for w in words if w in ("fast", "balanced", "best")), "fast"),
    }
    chosen["compile"] = "compiled" in words
    places = {"host": "host", "disk": f"disk:{tempfile.gettempdir()}"}
    chosen["offload"] = next((places[word] for word in words if word in places), None)
    module = rockmate.Rockmate(model, case.sample, budget_bytes, cache=False, **chosen)
    plan, seconds = module.plan, module.planning_seconds
    solving = ("options", "chain", "simulation", "search")
    facts = {
        "budget_bytes": budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "planned_overhead_percent": plan.overhead_percent,
        "gap_percent": None if plan.gap is None else 100 * plan.gap,
        "solve_seconds": sum(seconds.get(phase, 0.0) for phase in solving),
        "nodes": len(plan.problem.nodes),
        **facts_of_moves(plan.problem, plan),
        "solver": f"{plan.planner} ({chosen['cost']} costs, {chosen['effort']})",
    }
    return Applied(lambda: module(*case.sample), sum(seconds.values()), facts)


def facts_of_moves(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Return the columns about what a plan moves elsewhere, and how the link does."""
    link, base_ms = problem.link, plan.base_time_ms
    found: dict[str, Any] = {}
    if plan.bound_ms is not None and base_ms:
        found["bound_percent"] = 100 * max(0.0, plan.bound_ms / base_ms - 1)
    if link is not None:
        found["moved_bytes"] = sum(problem.sizes[k] for k in {m.storage for m in plan.moves})
        found["waiting_percent"] = 100 * plan.stall_ms / base_ms if base_ms else 0.0
        found["out_bytes_per_ms"] = link.out_bytes_per_ms
        found["in_bytes_per_ms"] = link.in_bytes_per_ms
    return found


def with_compiled_rockmate(
    setting: str, case: Case, model: nn.Module, budget_bytes: int
) -> Applied:
    """Rockmate with `compile=True`: compiled pieces within the bytes."""
    return with_rockmate(f"{setting} compiled", case, model, budget_bytes)


def with_planned_blocks(setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """Rockmate's `apply_to_blocks` on what others put a checkpoint around."""
    inside = set(map(id, case.blocks(model)))
    names = [name for name, module in model.named_modules() if id(module) in inside]
    plan = rockmate.apply_to_blocks(model, case.sample, budget_bytes, blocks=names, cache=False)
    facts = {
        "budget_bytes": budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "planned_overhead_percent": 100 * plan.overhead,
        "nodes": len(plan.rows),
    }
    return Applied(lambda: model(*case.sample), 0.0, facts)


def with_rotor(setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """rotor on the equivalent `nn.Sequential`, whose stages share the model's parameters."""
    chain = sequential(case, model)
    module = rotor.Checkpointable(chain)
    module.measure(case.sample[0])
    begin = time.perf_counter()
    schedule = module.compute_sequence(budget_bytes)
    facts = {
        "budget_bytes": budget_bytes,
        "predicted_peak_bytes": module.get_expected_memory(),
        "planned_overhead_percent": 100 * (schedule.makespan_ms / least_ms(module.chain) - 1),
        "solve_seconds": time.perf_counter() - begin,
        "nodes": len(module.chain),
        "solver": schedule.method,
    }
    return Applied(lambda: module(case.sample[0]), 0.0, facts)


def sequential(case: Case, model: nn.Module) -> nn.Sequential:
    """Return the network as the chain that rotor needs, or end the point as refused."""
    if case.stages is None:
        raise Outcome("refused", "rotor needs an nn.Sequential, and this network is no chain")
    return nn.Sequential(*case.stages(model, case.sample)).train()


def least_ms(chain: rotor.Chain) -> float:
    """Return the time of a step in which every stage runs once."""
    return rotor.strategies.no_checkpointing(chain).makespan_ms


# ------------------------------------------------------------------ torch.utils.checkpoint


def with_checkpoint(setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """`torch.utils.checkpoint` around the blocks that the setting names."""
    if setting in ("attention", "perceptron", "attention and perceptron"):
        for block in case.blocks(model):
            _halves(block, setting)
    elif setting == "nested":
        model.blocks.forward = functools.partial(_nested, list(case.blocks(model)))
    elif setting.endswith("segments"):
        blocks, count = list(case.blocks(model)), int(setting.split()[0])
        model.blocks.forward = lambda x: checkpoint_sequential(
            blocks, count, x, use_reentrant=False
        )
    else:
        for block in chosen_blocks(setting, case.blocks(model)):
            block.forward = functools.partial(run_again, block.forward)
    return Applied(lambda: model(*case.sample))


def chosen_blocks(setting: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a pattern: "every block", "every 2nd block", "first half", …"""
    count = len(blocks)
    steps = {"every block": 1, "every 2nd block": 2, "every 4th block": 4}
    parts = {"first quarter": count // 4, "first half": count // 2, "first 3/4": 3 * count // 4}
    if setting in steps:
        return list(blocks[:: steps[setting]])
    return list(blocks[: parts[setting]])


def _nested(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Checkpoints inside checkpoints: each half of a half, and so on."""
    if len(blocks) == 1:
        return run_again(blocks[0], x)
    middle = len(blocks) // 2

    def both(x: Tensor) -> Tensor:
        return _nested(blocks[middle:], _nested(blocks[:middle], x))

    return run_again(both, x)


def _halves(block: nn.Module, which: str) -> None:
    """Put checkpoints around the halves of a block of the GPT of the table of peers."""
    assert isinstance(block, Block)

    def attention(x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = block.qkv(block.ln1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, block.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return block.proj(y.transpose(1, 2).contiguous().view(batch, length, width))

    def perceptron(x: Tensor) -> Tensor:
        return block.out(F.gelu(block.fc(block.ln2(x)), approximate="tanh"))

    def forward(x: Tensor) -> Tensor:
        x = x + (run_again(attention, x) if "attention" in which else attention(x))
        return x + (run_again(perceptron, x) if "perceptron" in which else perceptron(x))

    block.forward = forward


# ------------------------------------------------------------------ selective checkpointing

ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
LINEAR = {aten.mm.default, aten.addmm.default, aten.linear.default}
HEAVY = {
    *ATTENTION,
    *LINEAR,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
}


def with_selection(setting: str, case: Case, model: nn.Module, budget_bytes: int) -> Applied:
    """Selective checkpointing around every block: some operators are saved, the rest runs again."""
    for block in case.blocks(model):
        block.forward = functools.partial(
            run_again, block.forward, context_fn=functools.partial(_contexts, setting)
        )
    return Applied(lambda: model(*case.sample))


def _contexts(setting: str) -> Any:
    """Return the contexts of one block: "save heavy", "save attention" or "save every 2nd"."""
    seen: dict[bool, Iterator[int]] = {False: itertools.count(1), True: itertools.count(1)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in (HEAVY if setting == "save heavy" else ATTENTION)
        if setting == "save every 2nd" and op in LINEAR:
            save = next(seen[context.is_recompute]) % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# ------------------------------------------------------------------ torch.compile


def with_compile(
    backend: str, setting: str, case: Case, model: nn.Module, budget_bytes: int
) -> Applied:
    """`torch.compile` with `activation_memory_budget`: "0.5", or "0.5 ilp" to name its solver."""
    words = [*setting.split(), "dp"]
    begin = time.perf_counter()
    random_state = torch.get_rng_state()
    module = compile_within(model, case.sample, backend, float(words[0]), words[1])
    torch.set_rng_state(random_state)
    facts = {"solver": f"{backend}, {words[1]}"}
    return Applied(
        lambda: module(*case.sample), time.perf_counter() - begin, facts, flops_of_graphs
    )


def with_moves_by_hand(
    moved: Callable[[str, Case, nn.Module], Callable[[], Tensor]],
    setting: str,
    case: Case,
    model: nn.Module,
    budget_bytes: int,
) -> Applied:
    """Offload written by hand, to the place that the setting names."""
    return Applied(moved(setting, case, model))


STRATEGIES: dict[str, Callable[[str, Case, nn.Module, int], Applied]] = {
    "plain": plain,
    "rockmate": with_rockmate,
    "rockmate-compiled": with_compiled_rockmate,
    "rockmate-blocks": with_planned_blocks,
    "rotor": with_rotor,
    "checkpoint": with_checkpoint,
    "selective": with_selection,
    "saved tensors": functools.partial(with_moves_by_hand, saved_tensors_moved),
    "layer inputs": functools.partial(with_moves_by_hand, layer_inputs_moved),
    "compile": functools.partial(with_compile, "inductor"),
    "compile-aot": functools.partial(with_compile, "aot_eager"),
}
