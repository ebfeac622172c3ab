"""Rockmate inside and around other people's wrappers and trainers."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.training import assert_same_gradients, eager_copy
from rockmate import Rockmate
from runs.planned import wrap
from runs.processes import run_in_processes
from zoo.nets import hugging_face_gpt2, network, tokens
from zoo.texts import Texts


def same_parameters(first: nn.Module, second: nn.Module) -> None:
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------- one process


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_activation_checkpointing(reentrant: bool) -> None:
    model, (pixels, labels) = network("mixer")
    twin = eager_copy(model)
    pixels.requires_grad_()
    wrapped = wrap(model, (pixels, labels))
    state = torch.get_rng_state()
    for module in (twin, wrapped):
        torch.set_rng_state(state)
        checkpoint(module, pixels, labels, use_reentrant=reentrant).backward()
    assert_same_gradients(model, twin)


def test_several_in_one_model() -> None:
    torch.manual_seed(0)

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8))

    model = nn.Sequential(part(), nn.Tanh(), part())
    twin = eager_copy(model)
    keys = list(model.state_dict())
    x = torch.randn(64, 8)
    model[0] = wrap(model[0], x)
    model[2] = wrap(model[2], x.clone().requires_grad_())
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    state = torch.get_rng_state()
    for module in (twin, model):
        torch.set_rng_state(state)
        for _ in range(2):
            module(x).square().sum().backward()
    assert_same_gradients(model, twin)
    model.load_state_dict(twin.state_dict())


def test_compile_around_falls_back_to_running_it() -> None:
    model, sample = network("mixer")
    twin = eager_copy(model)
    compiled = torch.compile(wrap(model, sample), backend="eager")
    state = torch.get_rng_state()
    for module in (twin, compiled):
        torch.set_rng_state(state)
        module(*sample).backward()
    assert_same_gradients(model, twin)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.inner(x))


def _never(_graph: Any, _inputs: Any) -> Any:
    raise AssertionError("something is compiled")


def _compiled(model: nn.Sequential, how: str) -> None:
    """Compile something of the model in a way that users do."""
    layer = model[1]
    if how == "submodule":
        model[1] = torch.compile(layer, backend=_never)
    elif how == "submodule in place":
        layer.compile(backend=_never)
    elif how == "model in place":
        model.compile(backend=_never)
    elif how == "forward":
        layer.forward = torch.compile(layer.forward, backend=_never)
    elif how == "forward of torch's":
        layer.inner.forward = torch.compile(layer.inner.forward, backend=_never)
    elif how == "function":
        layer.act = torch.compile(lambda x: torch.tanh(x) * 2, backend=_never)


@pytest.mark.parametrize(
    "how",
    [
        *("submodule", "submodule in place", "model in place", "forward", "forward of torch's"),
        *("function", "nothing"),
    ],
)
def test_compiled_parts_run_as_they_are_written(how: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Layer() for _ in range(4)])
    x = torch.randn(64, 8)
    twin = eager_copy(model)
    _compiled(twin, how)
    _compiled(model, how)
    with caplog.at_level(logging.INFO, "rockmate"):
        wrapped = wrap(model, x, 0.7)
    assert ("torch.compile" in caplog.text) == (how not in ("function", "nothing"))
    assert not wrapped.plan.opaque
    assert wrapped.plan.overhead > 0
    with torch.compiler.set_stance("force_eager"):
        expected = twin(x)
        expected.square().sum().backward()
    result = wrapped(x)
    result.square().sum().backward()
    assert torch.equal(result, expected)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_wrapper_is_compiled_apart_from_its_model() -> None:
    model = _Layer()
    x = torch.randn(4, 8)
    expected = model(x)
    model.compile(backend=_never)
    wrapped = wrap(model, x, "1MiB")
    assert torch.equal(wrapped(x), expected)
    with pytest.raises(Exception, match="something is compiled"):
        model(x)
    compiled = model._compiled_call_impl
    wrapped.compile(backend="eager")
    assert torch.equal(wrapped(x), expected)
    assert model._compiled_call_impl is compiled
    assert wrapped._compiled_call_impl is not compiled
    assert torch.equal(copy.deepcopy(wrapped)(x), expected)
    assert len(wrapped.plans) == 1


# ---------------------------------------------------------------------- two processes


def _distributed(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    model, (ids, targets) = network("gpt")
    twin = eager_copy(model)
    sample = ((ids + rank) % 120, targets)
    wrapped = wrap(model, sample, 0.6)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    ours = DistributedDataParallel(wrapped, bucket_cap_mb=0.05)
    theirs = DistributedDataParallel(twin, bucket_cap_mb=0.05)
    reduced: list[int] = []

    def reduce(_state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        reduced.append(len(order))
        return allreduce_hook(None, bucket)

    ours.register_comm_hook(None, reduce)
    theirs.register_comm_hook(None, allreduce_hook)
    for _ in range(2):
        state = torch.get_rng_state()
        theirs(*sample).backward()
        torch.set_rng_state(state)
        order.clear()
        reduced.clear()
        ours(*sample).backward()
        assert_same_gradients(model, twin)
        for module in (model, twin):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.05 * parameter.grad
            module.zero_grad()
    assert reduced[0] < len(order), "the first bucket must be sent while backward still runs"


def _sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model, sample = network("gpt")
    twin = eager_copy(model)
    x = torch.randn(4, 32, 64, requires_grad=True)
    model.blocks = nn.ModuleList(wrap(block, x) for block in model.blocks)
    for net in (model, twin):
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    for _ in range(2):
        state = torch.get_rng_state()
        twin(*sample).backward()
        torch.set_rng_state(state)
        model(*sample).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
        model.zero_grad()
        twin.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("work", ["_distributed", "_sharded"])
def test_two_processes_agree_with_eager(work: str) -> None:
    run_in_processes(__file__, work)


# ---------------------------------------------------------------------- trainers


def assert_ends_as_eager(train: Callable[[nn.Module], None]) -> Rockmate:
    """Train a GPT-2 and its wrapped equal; return the latter."""
    pytest.importorskip("transformers", reason="transformers is a test extra")
    plain, model = hugging_face_gpt2(), hugging_face_gpt2()
    ids, _ = tokens(4, 24, 90)
    wrapped = wrap(model, {"input_ids": ids, "labels": ids})
    train(plain)
    train(wrapped)
    same_parameters(model, plain)
    return wrapped


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra")
    pytest.importorskip("accelerate", reason="accelerate is a test extra")

    def train(model: nn.Module) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder, max_steps=12, per_device_train_batch_size=4, report_to=[],
                save_strategy="no", seed=3, use_cpu=True, disable_tqdm=True,
            )  # fmt: skip
            transformers.Trainer(model=model, args=arguments, train_dataset=Texts(42, 24)).train()

    wrapped = assert_ends_as_eager(train)
    assert len(wrapped.plans) > 1, "the smaller last batch must have been planned"


def test_hooks_of_a_device_map() -> None:
    """`from_pretrained(device_map="auto")` puts them around every module with quantised weights."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is a test extra")
    torch.manual_seed(0)
    layers = (p for _ in range(4) for p in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
    model, x = nn.Sequential(*layers), torch.randn(32, 16)
    twin = eager_copy(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    rk = wrap(model, x, 0.6)
    assert not rk.plan.opaque
    for _ in range(2):
        for net in (rk, twin):
            net.zero_grad()
            net(x).square().mean().backward()
        assert_same_gradients(model, twin)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    """In bfloat16 Accelerate keeps the bound forward of what it wraps among its attributes."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is a test extra")

    def train(model: nn.Module) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        loader = torch.utils.data.DataLoader(Texts(42, 24), batch_size=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        torch.manual_seed(1)
        for _, batch in zip(range(10), loader, strict=False):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    assert_ends_as_eager(train)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is a test extra")

    losses: list[float] = []

    class Task(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.model(**batch).loss

        def validation_step(self, batch: dict[str, Tensor], _index: int) -> None:
            losses.append(self.model(**batch).loss.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train(model: nn.Module) -> None:
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            max_steps=10, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
            val_check_interval=4, limit_val_batches=2,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(Texts(42, 24), batch_size=4)
        trainer.fit(Task(model), loader, loader)

    assert_ends_as_eager(train)
    half = len(losses) // 2
    assert losses[:half] == losses[half:]
    assert half > 0
