"""Planned in place: the same object, its class, name and state, whose forward runs a plan."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from oracles.training import assert_trains_like, eager_copy
from rkgb.engine import trace_memory
from rockmate import Rockmate, RockmateError
from runs.planned import wrap
from zoo.nets import TiedMLP, network


def applied(name: str = "gpt", budget: Any = 0.7, **options: Any) -> tuple[Any, nn.Module, Any]:
    model, sample = network(name)
    twin = eager_copy(model)
    assert rockmate.apply(model, sample, budget, cost="flops", **options) is model
    return model, twin, sample


def test_the_model_is_the_same_object_and_trains_in_the_budget() -> None:
    model, twin, sample = applied()
    assert type(model).__name__ == type(twin).__name__ == model._get_name()
    assert isinstance(model, type(twin))
    assert isinstance(model, Rockmate)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert inspect.signature(type(model).forward) == inspect.signature(type(twin).forward)
    assert inspect.signature(model.forward) == inspect.signature(twin.forward)
    assert_trains_like(model, twin, sample)
    model(*sample).backward()
    peak = trace_memory(lambda _: model(*sample).backward(), torch.device("cpu")).peak_bytes
    assert peak <= model.budget_bytes
    assert "predicted peak" in repr(model)


def test_it_is_undone() -> None:
    model, twin, sample = applied("resnet")
    before = set(vars(twin))
    assert rockmate.remove(model) is model
    assert type(model) is type(twin)
    assert set(vars(model)) == before
    assert_trains_like(model, twin, sample)
    assert rockmate.remove(model) is model
    wrapper = Rockmate(model, sample, "1MiB", cost="flops")
    assert rockmate.remove(wrapper) is model


def test_it_can_be_applied_again_and_wrapped() -> None:
    model, twin, sample = applied("tied", "1MiB")
    rockmate.apply(model, sample, "2MiB", cost="flops")
    assert model.budget_bytes == 2 << 20
    wrapper = Rockmate(model, sample, "4MiB", cost="flops")
    assert (model.budget_bytes, wrapper.budget_bytes) == (2 << 20, 4 << 20)
    assert_trains_like(wrapper, twin, sample)


def test_hooks_on_the_root_are_called() -> None:
    model, twin, sample = applied("mixer", "4MiB")
    counts = []
    for module in (twin, model):
        fired: list[str] = []
        module.register_forward_pre_hook(lambda *_, fired=fired: fired.append("pre"))
        module.register_forward_hook(lambda *_, fired=fired: fired.append("forward"))
        for _ in range(2):
            module(*sample).backward()
        module(*(t[:2] for t in sample)).backward()  # planned with the hooks there
        counts.append(fired)
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["deepcopy", "pickle", "torch.save"])
def test_copies_and_files(form: str) -> None:
    model, twin, sample = applied("tied", "1MiB")
    if form == "deepcopy":
        other = copy.deepcopy(model)
        assert len(other.plans) == 1
    elif form == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, TiedMLP)
    assert isinstance(other, Rockmate)
    assert all(a is not b for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert_trains_like(other, twin, sample)
    assert other.original is not model.original
    assert type(copy.copy(model)) is TiedMLP
    assert type(copy.copy(other.original)) is TiedMLP


def test_a_wrapper_that_its_own_attributes_lead_back_to_is_copied_once() -> None:
    """As Accelerate leaves it, which keeps the bound forward of what it wraps."""
    model, sample = network("tied")
    twins = eager_copy(model), eager_copy(model)
    wrapped = wrap(model, sample, "1MiB")
    wrapped.kept = wrapped.forward
    other = copy.deepcopy(wrapped)
    assert other.kept.__self__ is other
    assert other.original is not wrapped.original
    assert_trains_like(other, twins[0], sample)
    assert_trains_like(wrapped, twins[1], sample)  # a recording copies it from within


class Own(nn.Module):
    """Names of ours that are its own, a method that calls it, and itself inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.owner = [self]
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def backward(self, loss: Tensor) -> str:
        loss.backward()
        return "own"

    @property
    def plan(self) -> str:
        return "mine"

    def step(self, x: Tensor) -> str:
        self.seen += 1
        return self.backward(self(x).sum())


def test_a_models_own_names_and_methods_go_first() -> None:
    torch.manual_seed(0)
    model, x = Own(), torch.randn(3, 4)
    model.owner = []
    rockmate.apply(model, x, "1MiB", cost="flops")
    assert model.plan == "mine"
    assert model.step(x) == "own"
    assert model.linear.weight.grad is not None
    wrapper = Rockmate(model, x, "1MiB", cost="flops")
    assert wrapper.step(x) == "own"
    assert model.seen == wrapper.seen == 2


def test_a_model_that_holds_itself_is_copied_once() -> None:
    model, x = Own(), torch.randn(3, 4)
    rockmate.apply(model, x, "1MiB", cost="flops")
    other = copy.deepcopy(model)
    assert other.owner[0] is other
    other(x).sum().backward()
    assert model.linear.weight.grad is None
    assert pickle.loads(pickle.dumps(model)).owner[0].linear.weight.shape == (4, 4)


def test_a_forward_put_over_the_planned_one() -> None:
    model, twin, sample = applied("tied", "1MiB")
    inner = model.forward
    calls = []
    model.forward = lambda *args: calls.append(1) or inner(*args)
    assert_trains_like(model, twin, sample)
    assert calls
    del model.forward
    count = len(calls)
    model(*sample)
    assert len(calls) == count


def test_a_planned_module_inside_a_planned_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    rockmate.apply(model[1], x, "1MiB", cost="flops")
    rockmate.apply(model, x, "1MiB", cost="flops")
    assert_trains_like(model, twin, (x,))


def test_what_cannot_be_done_is_said() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(TypeError, match="badget"):
        rockmate.apply(model, x, "1MiB", badget=3)
    assert type(model) is nn.Linear
    rockmate.apply(model, x, "1MiB", cost="flops")
    model.__class__ = type("Sharded", (type(model),), {})
    with pytest.raises(RockmateError, match="class of Sharded was changed"):
        rockmate.remove(model)


# ---------------------------------------------------------------------- Hugging Face


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["apply", "wrap"])
def test_trainer_sees_the_model_that_it_knows(form: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra")
    pytest.importorskip("accelerate", reason="accelerate is a test extra")
    ids = torch.randint(1, 100, (8, 16))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=64,
                vocab_size=100,
                use_cache=False,
            )
        ).train()
        if planned:
            sample = {"input_ids": ids[:4], "labels": ids[:4]}
            options: Any = {"cost": "flops", "self_test": False}
            make = rockmate.apply if form == "apply" else Rockmate
            model = make(model, sample, "64MiB", **options)
        folder = tmp_path / str(planned)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, report_to=[],
            use_cpu=True, disable_tqdm=True, label_smoothing_factor=0.1, seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, eval_dataset=rows
        )
        loss = trainer.train().training_loss
        found.append((loss, trainer.evaluate()["eval_loss"]))
        trainer.save_model(str(folder))
        assert (folder / "config.json").exists()
        assert "LlamaForCausalLM" in (folder / "config.json").read_text()
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_itself(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is a test extra")

    class Task(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            return self(batch[0]).square().mean()

        def validation_step(self, batch: list[Tensor], _index: int) -> None:
            assert not self(batch[0]).requires_grad

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(20, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        task = Task()
        if planned:
            rockmate.apply(task, torch.randn(8, 16), "1MiB", cost="flops", self_test=False)
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            max_steps=7, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
            val_check_interval=2,
        )  # fmt: skip
        trainer.fit(task, loader, loader)
        found.append({name: value.clone() for name, value in task.state_dict().items()})
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert len(task.plans) <= 3, "two sizes, and what the trainer writes on the module once"
