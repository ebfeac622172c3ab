"""Per-layer FSDP2 with and without plans: the same bits in three steps, the budget on each rank."""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from oracles.training import eager_copy
from rkgb.copies import LinkRates
from rkgb.engine import trace_memory
from rockmate.blockwise import planning
from rockmate.blockwise.team import Team
from rockmate.networks import offload
from rockmate.problems.link import Link
from runs.processes import run_in_processes
from zoo.nets import TinyGPT, tokens

MOST_STEPS = 50  # that are looked at until gloo's threads were in time in one

# What is on: the order of wrapping, reshard_after_forward, and what training does besides.
CASES = {
    "usual": {"accumulate": 2, "clip": True},
    "kept gathered": {"reshard": False},
    "resharded": {"reshard": True, "frozen": True, "clip": True},
    "mixed precision": {"mixed": True, "checkpoint": True},
    "blocks first": {"first": True, "clip": True, "accumulate": 2},
    "blocks first, mixed precision": {"first": True, "mixed": True},
    "moving": {"offload": "host", "clip": True},
}


def _carries_all(*_: Any) -> LinkRates:
    return LinkRates(1e12, 1e12, 0.0, is_shared=False)


def shard(model: Any, *, reshard: bool | None = None, mixed: bool = False, **_: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def train(
    model: Any, sample: Any, *, accumulate: int = 1, clip: bool = False, checkpoint: bool = False,
    **_: Any,
) -> list[Tensor]:  # fmt: skip
    """Train three steps; return all that was seen on this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(3):
        for part in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(part + 1 == accumulate)
            loss = model(*sample)
            loss.backward()
        seen.append(loss.detach())
        if clip:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            seen.append(norm.full_tensor())
        seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [p.detach().to_local().clone() for p in model.parameters()]
        if checkpoint and step == 1:
            save_and_load(model)
    return seen


def save_and_load(model: nn.Module) -> None:
    """Write the parameters, spoil them, and read them back."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    names = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(names)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=names[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=names[0])
    set_model_state_dict(model, state)


def peak_bytes(model: nn.Module, sample: Any, limit_bytes: int | None = None) -> int:
    """Return the least peak of some steps: gloo's threads let go of tensors a moment late.

    With a limit, steps go on until one on each rank was within it: on a busy machine the threads
    are late in most of them. What a plan itself takes is the same in every step.
    """

    def step(_: Any = None) -> None:
        model(*sample).backward()

    step()
    least = sys.maxsize
    for count in range(3 if limit_bytes is None else MOST_STEPS):
        least = min(least, trace_memory(step, torch.device("cpu")).peak_bytes)
        if limit_bytes is not None and count >= 2 and all_agree(least <= limit_bytes):
            break
    return least


def all_agree(value: bool) -> bool:
    agreed = torch.tensor(int(value))
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN)
    return bool(agreed)


def trains_like_fsdp(rank: int, *names: str) -> None:
    torch.manual_seed(0)
    original = TinyGPT(layers=3, width=32, vocab=60, length=24)  # head and embedding are tied
    ids, targets = tokens(4, 24, 60)
    sample = ((ids + rank) % 60, targets)
    for name in names:
        options = CASES[name]
        model, twin = eager_copy(original), eager_copy(original)
        if options.get("frozen"):
            for net in (model, twin):
                net.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
                net.ln.requires_grad_(False)  # type: ignore[union-attr]
        shard(twin, **options)
        plain = peak_bytes(twin, sample)
        twin.zero_grad()
        if not options.get("first"):
            shard(model, **options)
        keys = list(model.state_dict())
        where = options.get("offload")
        if where is not None:  # only the first process measures
            offload.measured_link = _carries_all if rank == 0 else None  # type: ignore[assignment]
        how: dict[str, Any] = {"cost": "flops", "compare": False, "offload": where}
        plan = rockmate.apply_to_blocks(model, sample, 0.65, **how)
        if options.get("first"):
            shard(model, **options)
        if where is not None:
            assert all(row.moved_bytes for row in plan.rows)
            assert plan.file is not None
            assert plan.file.blocks is not None
            assert plan.file.blocks.link == Link(1e12 / 2, 1e12 / 2)
        assert list(model.state_dict()) == keys == list(twin.state_dict())
        assert (plan.overhead_ms > 0) == (where is None)
        state = torch.get_rng_state()
        expected = train(twin, sample, **options)
        torch.set_rng_state(state)
        found = train(model, sample, **options)
        assert len(found) == len(expected)
        same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        assert all(same), f"{name}: {same.count(False)} of {len(same)} tensors differ"
        bounded = not options.get("first")
        peak = peak_bytes(model, sample, plan.budget_bytes if bounded else None)
        if bounded:
            assert peak <= plan.budget_bytes, f"{name}: {peak} > {plan.budget_bytes}"
            assert peak < 0.8 * plain
        print(f"rank {rank}, {name}: plain {plain}, budget {plan.budget_bytes}, peak {peak}")


def all_fail_together(rank: int) -> None:
    torch.manual_seed(0)
    model = TinyGPT(layers=2, width=32, vocab=60, length=24)
    ids, targets = tokens(4, 24, 60)
    shard(model)
    budget = 10**9 if rank else 1000  # the strictest counts
    with pytest.raises(rockmate.InfeasibleBudgetError, match="within 1000 bytes") as strict:
        rockmate.apply_to_blocks(model, (ids, targets), budget, cost="flops", compare=False)
    enough = 2 * strict.value.minimum_bytes
    # What cannot be planned on one process is refused on all of them, after the step.
    if rank:
        model.blocks[1].mlp.append(Setting())  # type: ignore[union-attr, operator, index]
    with pytest.raises(rockmate.RockmateError, match="on rank 1 of 2") as refused:
        rockmate.apply_to_blocks(model, (ids, targets), enough, cost="flops", compare=False)
    assert_same_on_all(str(refused.value))
    if rank:
        del model.blocks[1].mlp[-1]  # type: ignore[union-attr, index]
    # What one process asks wrongly, before anything runs.
    for wrong in ({"effort": "none"}, {"blocks": ["layers"]}, {"in_flight": 0}):
        options: dict[str, Any] = wrong if rank else {}
        with pytest.raises(rockmate.RockmateError, match="on rank 1 of 2") as refused:
            rockmate.apply_to_blocks(model, (ids, targets), enough, **options)
        assert_same_on_all(str(refused.value))
    # What is found while the memory of a step is looked at, which the others go on with.
    order = planning.BlockPlanner._refuse_another_order
    if rank:
        planning.BlockPlanner._refuse_another_order = _refuses  # type: ignore[method-assign]
    with pytest.raises(
        rockmate.RockmateError, match="on rank 1 of 2: ValueError: another order"
    ) as refused:
        rockmate.apply_to_blocks(model, (ids, targets), enough, cost="flops", compare=False)
    assert_same_on_all(str(refused.value))
    planning.BlockPlanner._refuse_another_order = order  # type: ignore[method-assign]
    model(ids, targets).backward()  # still usable
    plan = rockmate.apply_to_blocks(model, (ids, targets), enough, cost="flops", compare=False)
    assert plan.measured_peak_bytes <= enough


def fails_in_a_step(rank: int) -> None:
    """One process leaves a step and lives on; the other waits in it, as long as its group does."""
    torch.distributed.barrier()
    group = torch.distributed.new_group(timeout=timedelta(seconds=8))
    team = Team.of(nn.Linear(1, 1), group)
    assert team.place == rank
    text = "on rank 1 of 2: RuntimeError: no data here"
    with pytest.raises(rockmate.RockmateError, match=f"^{text}$"):
        step_of(rank, team)
    torch.distributed.barrier()


def step_of(rank: int, team: Team) -> None:
    with team.in_step():
        if rank:
            raise RuntimeError("no data here")
        torch.distributed.all_reduce(torch.ones(4), group=team.groups[0])


def chooses_again_together(rank: int) -> None:
    """Losses outside that differ between processes: all leave what the largest took."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    model, x = nn.Sequential(nn.Linear(64, 64), *layers), torch.randn(256, 64)
    twin = eager_copy(model)
    for net in (model, twin):
        for layer in net[1:]:
            fully_shard(layer)
        fully_shard(net)
    how: dict[str, Any] = {"optimizer": "adamw", "cost": "flops", "compare": False}
    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.apply_to_blocks(model, x, memory=1000, **how)
    memory = int(1.1 * refused.value.minimum_bytes)
    plan = rockmate.apply_to_blocks(model, x, memory=memory, **how)
    before, estimate_bytes = plan.budget_bytes, 4 * x.nbytes
    for _ in range(3):
        for net in (model, twin):
            y = net(x)
            (y.abs().square().mean() if rank else y.mean()).backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    assert "StepHook" not in str(model._forward_pre_hooks), "it watches no more"
    assert_same_on_all(str([(row.path, row.kept_bytes) for row in plan.rows]))
    assert_same_on_all(str(plan.budget_bytes))
    assert plan.memory is not None
    own = next(part.size_bytes for part in plan.memory.parts if part.name.endswith("as seen"))
    taken: list[Any] = [None, None]
    torch.distributed.all_gather_object(taken, own)
    assert before + estimate_bytes - plan.budget_bytes == taken[1] > taken[0]
    limit_bytes = plan.budget_bytes + taken[1]
    assert peak_bytes(nn.Sequential(model, Mean()), (x,), limit_bytes) <= limit_bytes


class Mean(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.abs().square().mean()


def assert_same_on_all(text: str) -> None:
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, text)
    assert set(rows) == {text}


def _refuses(*_: Any) -> None:
    raise ValueError("another order")


class Setting(nn.Module):
    """Sets for all that runs later how autocast casts, which no step would do."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", False)
        return x + 1


@pytest.mark.slow
def test_per_layer_sharding() -> None:
    run_in_processes(__file__, "trains_like_fsdp", "usual", "moving")


@pytest.mark.nightly
def test_the_matrix_of_per_layer_sharding() -> None:
    run_in_processes(
        __file__, "trains_like_fsdp", *(n for n in CASES if n not in ("usual", "moving"))
    )


@pytest.mark.nightly
def test_four_processes() -> None:
    run_in_processes(__file__, "trains_like_fsdp", "usual", world=4)


@pytest.mark.nightly
def test_one_error_for_all_processes() -> None:
    run_in_processes(__file__, "all_fail_together")


@pytest.mark.slow
def test_blocks_are_chosen_again_together() -> None:
    run_in_processes(__file__, "chooses_again_together")


@pytest.mark.slow
def test_an_error_in_a_step_reaches_those_who_wait() -> None:
    run_in_processes(__file__, "fails_in_a_step")
