"""Inside torch's other engines: pipelines, DDP and tensor parallelism, on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

import rockmate
from oracles.training import eager_copy
from rkgb.engine import trace_memory
from rockmate.blockwise import kinds
from runs.processes import run_in_processes
from zoo.nets import Block, TinyGPT, tokens

CPU = torch.device("cpu")


# ---------------------------------------------------------------------- pipelines


class Stage(nn.Module):
    """Half of a GPT, without dropout: micro-batches draw in another order on each schedule."""

    def __init__(self, rank: int, width: int = 32, vocab: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width) if rank == 0 else nn.Identity()
        self.layers = nn.ModuleList(Block(width, 4, 0.0) for _ in range(2))
        self.head = nn.Linear(width, vocab) if rank == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipelines(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    parts, length, width = 4, 24, 32
    ids, targets = tokens(4 * parts, length, 40)
    for kind, in_flight in ((ScheduleGPipe, parts), (Schedule1F1B, 2 - rank)):
        torch.manual_seed(rank)
        model = Stage(rank)
        twin = eager_copy(model)
        sample = ids[:4] if rank == 0 else torch.randn(4, length, width, requires_grad=True)
        plan = rockmate.apply_to_blocks(
            model, sample, 0.6, cost="flops", compare=False, in_flight=in_flight
        )
        assert plan.overhead_ms > 0
        assert plan.in_flight == in_flight

        def train(net: nn.Module, kind: Any = kind) -> tuple[list[Tensor], int]:
            stage = PipelineStage(net, rank, 2, CPU)
            schedule = kind(stage, parts, loss_fn=loss_of)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            seen: list[Tensor] = []

            def step(_: Any = None) -> None:
                losses: list[Tensor] = []
                if rank == 0:
                    schedule.step(ids)
                else:
                    schedule.step(target=targets, losses=losses)
                seen.extend(loss.detach() for loss in losses)

            for _ in range(3):
                step()
                seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
                seen += [p.detach().clone() for p in net.parameters()]
            step()
            return seen, min(trace_memory(step, CPU).peak_bytes for _ in range(2))

        expected, plain = train(twin)
        found, peak = train(model)
        assert len(found) == len(expected) > 6
        assert all(map(torch.equal, found, expected)), kind.__name__
        # What goes from stage to stage, or waits to, is input and output of all micro-batches.
        passed = 2 * parts * 4 * 4 * length * max(width, 40)
        print(f"{kind.__name__} {rank}: plain {plain}, budget {plan.budget_bytes}, peak {peak}")
        assert peak <= plan.budget_bytes + passed
        assert peak < plain


# ---------------------------------------------------------------------- DDP


def data_parallel(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    ids, targets = tokens(4, 24, 60)
    sample = ((ids + rank) % 60, targets)
    for static in (False, True):
        for blockwise in (False, True):
            torch.manual_seed(0)
            model: Any = TinyGPT(layers=2, width=32, vocab=60, length=24)
            twin = eager_copy(model)
            if blockwise:
                rockmate.apply_to_blocks(model, sample, 0.7, cost="flops", compare=False)
            else:
                rockmate.apply(model, sample, 0.7, cost="flops")

            def train(net: nn.Module, static: bool = static) -> list[Tensor]:
                parallel = DistributedDataParallel(
                    net, static_graph=static, gradient_as_bucket_view=True, bucket_cap_mb=0.02
                )
                if not static:
                    parallel.register_comm_hook(None, fp16_compress_hook)
                optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
                seen = []
                for _ in range(3):
                    if not static:  # which DDP cannot combine
                        with parallel.no_sync():
                            parallel(*sample).backward()
                    parallel(*sample).backward()
                    seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
                    optimizer.step()
                    optimizer.zero_grad()
                    seen += [p.detach().clone() for p in net.parameters()]
                return seen

            state = torch.get_rng_state()
            expected = train(twin)
            torch.set_rng_state(state)
            found = train(model)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), (static, blockwise)


# ---------------------------------------------------------------------- tensor parallelism


class Llama(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.layers = nn.ModuleList(LlamaLayer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, 40, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


class LlamaLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def parallelized(model: Any, *, sequence: bool, mesh: Any = None) -> None:
    """Spread the layers over two processes: columns and rows of weights, and parts of sequences."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh or init_device_mesh("cpu", (2,))
    here = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {n: ColwiseParallel(input_layouts=here) for n in ("q", "k", "v")}
    plan |= {n: ColwiseParallel(input_layouts=here) for n in ("gate", "up")}
    plan |= {n: RowwiseParallel(output_layouts=here) for n in ("o", "down")}
    if sequence:
        plan |= {n: SequenceParallel(use_local_output=True) for n in ("norm1", "norm2")}
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=here),
            "norm": SequenceParallel(use_local_output=True),
            "output": ColwiseParallel(input_layouts=here, output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def assert_trained_alike(model: nn.Module, twin: nn.Module, sample: tuple[Tensor, Tensor]) -> None:
    """Hold three steps of both to each other, in what this process has of them."""

    def train(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        seen = []
        for _ in range(3):
            loss = net(*sample)
            loss.backward()
            seen.append(loss.detach())
            seen += [_own(p.grad).clone() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            seen += [_own(p).detach().clone() for p in net.parameters()]
        return seen

    expected, found = train(twin), train(model)
    assert len(found) == len(expected) > 6
    assert all(map(torch.equal, found, expected))


def tensor_parallel(rank: int, kind: str) -> None:
    torch.manual_seed(0)
    if rank:  # what gloo's threads still hold is measured too, so that processes find other options
        options = kinds.module_options
        kinds.module_options = lambda *args, **named: options(*args, **named)[:1]
    model = Llama(layers=3)
    twin = eager_copy(model)
    ids, targets = tokens(4, 24, 40)
    for net in (model, twin):
        parallelized(net, sequence=kind == "sequence")
    with pytest.raises(rockmate.UnsupportedModuleError, match="apply_to_blocks"):
        rockmate.Rockmate(eager_copy(model), (ids, targets), 0.7, cost="flops", share=False)
    plan = rockmate.apply_to_blocks(model, (ids, targets), 0.7, cost="flops", compare=False)
    assert plan.overhead_ms > 0

    assert_trained_alike(model, twin, (ids, targets))
    ours, plain = (_largest(_peak(net, (ids, targets))) for net in (model, twin))
    print(f"{kind} {rank}: plain {plain}, budget {plan.budget_bytes}, peak {ours}")
    assert ours <= plan.budget_bytes
    assert ours < 0.9 * plain
    # Nobody plans alone what all must run in one order: a call of another kind runs plain.
    with pytest.warns(RuntimeWarning, match="runs plain"):
        loss = model(ids[:2], targets[:2])
    assert torch.equal(loss, twin(ids[:2], targets[:2]))


def sharded_and_parallel(rank: int) -> None:
    """On a mesh of two dimensions: layers spread over one, and sharded over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Llama(layers=3)
    twin = eager_copy(model)
    for net in (model, twin):
        parallelized(net, sequence=False, mesh=mesh["tensor"])
        for layer in net.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
    ids, targets = tokens(4, 24, 40)
    ids = (ids + mesh["data"].get_local_rank()) % 40
    plan = rockmate.apply_to_blocks(model, (ids, targets), 0.7, cost="flops", compare=False)
    assert plan.overhead_ms > 0
    kept: list[Any] = [None] * 4
    torch.distributed.all_gather_object(kept, [row.overhead for row in plan.rows])
    assert all(row == kept[0] for row in kept)
    assert_trained_alike(model, twin, (ids, targets))
    ours, plain = (_largest(_peak(net, (ids, targets))) for net in (model, twin))
    print(f"rank {rank}: plain {plain}, budget {plan.budget_bytes}, peak {ours}")
    assert ours <= plan.budget_bytes
    assert ours < 0.9 * plain


def _largest(own_bytes: int) -> int:
    """Return the largest of all processes, so that all fail or none."""
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, own_bytes)
    return max(rows)


def _peak(net: nn.Module, sample: tuple[Tensor, Tensor]) -> int:
    def step(_: Any = None) -> None:
        net(*sample).backward()

    # Threads of gloo let go of what they send a moment late, on a busy machine nearly always: the
    # least of many steps is what the plan takes.
    step()
    return min(trace_memory(step, CPU).peak_bytes for _ in range(24))


def _own(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _no_solver(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no solver here")


def tensor_parallel_fails(rank: int) -> None:
    """One process refuses a block, and all say so: none waits in a collective for it."""
    torch.manual_seed(0)
    model = Llama()
    parallelized(model, sequence=False)
    ids, targets = tokens(4, 24, 40)
    options = kinds.module_options
    if rank:
        kinds.module_options = _no_solver
    text = "on rank 1 of 2: RuntimeError: no solver here"
    with pytest.raises(rockmate.RockmateError, match=text):
        rockmate.apply_to_blocks(model, (ids, targets), 0.7, cost="flops", compare=False)
    kinds.module_options = options
    model(ids, targets).backward()  # still usable


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        "pipelines",
        "data_parallel",
        pytest.param("tensor_parallel sequence", marks=pytest.mark.nightly),
        pytest.param("tensor_parallel features", marks=pytest.mark.nightly),
        pytest.param("tensor_parallel_fails", marks=pytest.mark.nightly),
    ],
)
def test_two_processes(work: str) -> None:
    print(*run_in_processes(__file__, *work.split()))


@pytest.mark.nightly
def test_four_processes() -> None:
    print(*run_in_processes(__file__, "sharded_and_parallel", world=4))
