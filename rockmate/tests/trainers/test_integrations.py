"""One switch in a trainer: everything that it does ends as without, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from rockmate import BudgetFormatError, Rockmate, RockmateError, integrations
from zoo.nets import hugging_face_gpt2
from zoo.texts import Texts

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers themselves
BUDGET = 0.8


def correct(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    return {"correct": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean())}


def callback(**options: Any) -> Any:
    pytest.importorskip("transformers", reason="transformers is a test extra")
    pytest.importorskip("accelerate", reason="accelerate is a test extra")
    from rockmate.integrations import RockmateCallback

    return RockmateCallback(BUDGET, cost="flops", **options)


def trainer_of(model: nn.Module | None, folder: Path, callbacks: list[Any], **changes: Any) -> Any:
    import transformers

    given = {
        "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3,
        "model_init": None, **changes,
    }  # fmt: skip
    init = given.pop("model_init")
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Texts(18, 16),
        eval_dataset=torch.utils.data.Subset(Texts(18, 16), range(6)),
        compute_metrics=correct,
        callbacks=callbacks,
        model_init=init,
    )


def history(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without seconds."""
    slow = ("runtime", "per_second", "memory")
    return [
        {name: value for name, value in row.items() if not any(word in name for word in slow)}
        for row in trainer.state.log_history
    ]


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    assert isinstance(ours, Rockmate)
    assert not isinstance(theirs, Rockmate)
    assert type(ours).__name__ == type(theirs).__name__
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
            marks=pytest.mark.nightly,
        ),
        {"gradient_checkpointing": True},
        {"bf16": True, "load_best_model_at_end": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_hugging_face_ends_as_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    switch = callback(report=str(tmp_path / "plan.html"))
    trainers = []
    for name, callbacks in (("with", [switch]), ("without", [])):
        model = hugging_face_gpt2()
        trainer = trainer_of(model, tmp_path / name, callbacks, **changes)
        trainer.train()
        trainer.save_model(str(tmp_path / name / "saved"))
        trainers.append(trainer)
    ours, theirs = trainers
    assert_same(ours.model, theirs.model)
    assert history(ours) == history(theirs)
    assert [row["eval_correct"] for row in history(ours) if "eval_loss" in row]
    assert ours.model.plan.overhead > 0
    assert (tmp_path / "plan.html").stat().st_size > 1000
    saved = [
        json.loads((tmp_path / n / "saved/config.json").read_text()) for n in ("with", "without")
    ]
    assert saved[0] == saved[1]
    prompt = torch.tensor([[5, 7, 11]])
    words = [
        t.model.eval().generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
        for t in trainers
    ]
    assert torch.equal(*words)
    again = type(theirs.model).from_pretrained(tmp_path / "with" / "saved")
    for mine, other in zip(again.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.nightly
def test_hugging_face_resumes(tmp_path: Path) -> None:
    whole = trainer_of(hugging_face_gpt2(), tmp_path / "whole", [])
    whole.train()
    trainer_of(hugging_face_gpt2(), tmp_path / "ours", [callback()]).train()
    resumed = trainer_of(hugging_face_gpt2(), tmp_path / "ours", [callback()])
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same(resumed.model, whole.model)


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_followed_by_a_smaller_one(tmp_path: Path) -> None:
    callback()  # or skip
    from rockmate.integrations import RockmateCallback

    def sample(count: int) -> dict[str, Tensor]:
        ids = torch.stack([Texts(18, 16).ids[k] for k in range(count)])
        return {"input_ids": ids, "labels": ids}

    with pytest.raises(rockmate.InfeasibleBudgetError) as refused:
        rockmate.Rockmate(
            *(hugging_face_gpt2(), sample(3)), memory=1000, optimizer="adamw", cost="flops"
        )
    memory = refused.value.minimum_bytes + 4000
    largest = rockmate.largest_batch(hugging_face_gpt2(), sample, memory, device="cpu")
    assert largest.batch == 3
    switch = RockmateCallback(memory=memory, cost="flops")
    trainer = trainer_of(
        *(hugging_face_gpt2(), tmp_path, [switch]),
        **{"auto_find_batch_size": True, "per_device_train_batch_size": 5, "max_steps": 2},
        **{"eval_strategy": "no", "save_strategy": "no"},
    )
    trainer.train()
    assert trainer.state.train_batch_size == largest.batch
    assert trainer.model.memory.asked_bytes == memory
    assert "state of AdamW" in str(trainer.model.memory)


@pytest.mark.slow
def test_a_model_that_comes_later_is_planned_too(tmp_path: Path) -> None:
    quiet = {"eval_strategy": "no", "save_strategy": "no", "bf16": True, "max_steps": 2}
    plain = trainer_of(None, tmp_path, [], model_init=lambda: hugging_face_gpt2(), **quiet)
    plain.train()
    ours = trainer_of(None, tmp_path, [callback()], model_init=lambda: hugging_face_gpt2(), **quiet)
    ours.train()
    assert_same(ours.model, plain.model)
    plain = trainer_of(hugging_face_gpt2(), tmp_path, [], **quiet)
    plain.train()
    late = trainer_of(hugging_face_gpt2(), tmp_path, [], **quiet)
    late.add_callback(callback())
    late.train()
    assert_same(late.model, plain.model)
    assert late.model.plan.overhead > 0


@pytest.mark.slow
def test_supervised_fine_tuning_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl brings a large data library")
    datasets = pytest.importorskip("datasets", reason="trl brings it")
    import transformers

    rows = datasets.Dataset.from_list(
        [{"input_ids": Texts(18, 16).ids[k].tolist()} for k in range(8)]
    )
    models = []
    for callbacks in ([callback()], []):
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=_tokenizer(), pad_token="0", eos_token="1"
        )
        trainer = trl.SFTTrainer(
            model=hugging_face_gpt2(),
            args=trl.SFTConfig(
                output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[],
                use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no",
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        models.append(trainer.model)
    assert models[0].measured_peak_bytes <= models[0].budget_bytes
    assert_same(*models)


def _tokenizer() -> Any:
    import tokenizers

    return tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(k): k for k in range(90)}, unk_token="0")
    )


@pytest.mark.slow
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_loop_of_accelerate(mixed_precision: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is a test extra")
    models = []
    for budget in (BUDGET, None):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2
        )
        model = hugging_face_gpt2()
        if budget is not None:
            rockmate.apply(model, budget=budget, cost="flops")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(Texts(18, 16), batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        torch.manual_seed(1)
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        models.append(accelerator.unwrap_model(prepared))
    assert_same(*models)


# ---------------------------------------------------------------------- Lightning


def fit(folder: Path, callbacks: list[Any], **changes: Any) -> tuple[Any, list[float]]:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is a test extra")
    losses: list[float] = []

    class Task(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()

        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = hugging_face_gpt2()

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            return self.model(**batch).loss

        def validation_step(self, batch: dict[str, Tensor], _index: int) -> None:
            losses.append(self.model(**batch).loss.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(1)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, val_check_interval=2,
        limit_val_batches=2, callbacks=callbacks, **changes,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Texts(18, 16), batch_size=4)
    task = Task()
    trainer.fit(task, loader, loader)
    trainer.save_checkpoint(folder / "last.ckpt")
    return task, losses


def lightning_callback(*given: Any, **options: Any) -> Any:
    pytest.importorskip("lightning.pytorch", reason="lightning is a test extra")
    from rockmate.integrations import LightningCallback

    return LightningCallback(BUDGET, *given, cost="flops", **options)


@pytest.mark.slow
def test_lightning_counts_the_optimizers_of_the_task(tmp_path: Path) -> None:
    lightning_callback()  # or skip
    from rockmate.integrations import LightningCallback

    switch = LightningCallback(memory="1GB", cost="flops")
    task, _ = fit(tmp_path, [switch], accumulate_grad_batches=2)
    assert task.model.memory.asked_bytes == 10**9
    assert "state of AdamW" in str(task.model.memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.nightly),
        {"precision": "bf16-mixed"},
    ],
)
def test_lightning_ends_as_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    switch = lightning_callback(report=str(tmp_path / "plan.html"))
    ours, our_losses = fit(tmp_path / "ours", [switch], **changes)
    theirs, their_losses = fit(tmp_path / "theirs", [], **changes)
    assert_same(ours.model, theirs.model)
    assert our_losses == their_losses
    assert our_losses
    assert (tmp_path / "plan.html").stat().st_size > 1000
    files = [
        torch.load(tmp_path / name / "last.ckpt", weights_only=False)["state_dict"]
        for name in ("ours", "theirs")
    ]
    assert list(files[0]) == list(files[1])
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        ("", lambda: nn.Bilinear(2, 2, 2), "0 children with parameters"),
        ("", lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "2 children.*0, 1"),
        ("body", lambda: nn.Sequential(nn.Linear(2, 2)), "no submodule 'body'"),
    ],
)  # fmt: skip
def test_lightning_is_told_which_network(
    module: str, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(RockmateError, match=message):
        lightning_callback(module).on_fit_start(None, make())


# ---------------------------------------------------------------------- at the first step


def test_without_a_sample_the_first_training_step_is_planned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    x = torch.randn(32, 16)
    expected = model(x)
    assert rockmate.apply(model, budget="1MiB", cost="flops") is model
    assert "not planned yet" in repr(model)
    with pytest.raises(RockmateError, match="without a sample"):
        _ = model.plan
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert not model.plans
    assert torch.equal(model(x), expected)
    assert model.plan.budget_bytes == 1 << 20


def test_a_missing_or_wrong_argument_is_refused_at_once() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="needs a budget"):
        rockmate.apply(model)
    with pytest.raises(BudgetFormatError):
        rockmate.apply(model, budget="8 gigs")
    with pytest.raises(TypeError, match="beside a sample only"):
        rockmate.apply(model, budget="8GB", kwargs={"x": 1})
    assert type(model) is nn.Linear


def test_each_library_is_imported_only_when_its_switch_is() -> None:
    code = (
        "import sys, rockmate.integrations as i; "
        "assert not {'transformers', 'lightning'} & set(sys.modules); print(dir(i))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(integrations.__all__)
    import rockmate.integrations as switches

    with pytest.raises(AttributeError, match="nothing"):
        _ = switches.nothing
