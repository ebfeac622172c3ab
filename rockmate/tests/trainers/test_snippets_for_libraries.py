"""The snippets of docs/how-to/trainers.md for other libraries, each run as it stands there."""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from rockmate import Rockmate
from zoo.nets import hugging_face_gpt2
from zoo.texts import Texts

PAGE = Path(__file__).parents[3] / "docs/how-to/trainers.md"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def snippet(title: str, names: dict[str, Any], budget: float = 0.7) -> dict[str, Any]:
    """Run the code below a title of the page, with this share of plain's peak as its budget."""
    section = PAGE.read_text("utf-8").partition(f"\n### {title}\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, title
    assert len(found[1].splitlines()) <= 7
    exec(found[1].replace('"8GB"', str(budget)), names)
    return names


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    assert isinstance(ours, Rockmate)
    assert ours.measured_peak_bytes <= ours.budget_bytes
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is a test extra")
    model, batches = hugging_face_gpt2(), torch.stack([Texts(18, 16).ids[:4]] * 3)
    plain = deepcopy(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    for module in (model, plain):
        optimizer = torch.optim.AdamW(module.parameters())
        loader = torch.utils.data.DataLoader([*batches], batch_size=None)
        names = {"rockmate": rockmate, "accelerator": accelerator, "model": module}
        names |= {"optimizer": optimizer, "loader": loader}
        if module is model:
            snippet("accelerate", names)
        torch.manual_seed(0)
        for ids in batches:
            accelerator.backward(module(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, plain)


def test_scripts_with_hf_argument_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra")
    from rockmate.integrations import RockmateArguments

    rows = [{"input_ids": row, "labels": row} for row in Texts(18, 16).ids[:8]]
    words = ["--output_dir", str(tmp_path), "--max_steps", "2", "--use_cpu", "--report_to", "none"]
    names = {"RockmateArguments": RockmateArguments, "rows": rows}
    for name in ("HfArgumentParser", "Trainer", "TrainingArguments"):
        names[name] = getattr(transformers, name)
    model = hugging_face_gpt2()
    plain = deepcopy(model)
    page = tmp_path / "plan.html"
    for module, more in ((plain, []), (model, ["--budget", "60%", "--plan_report", str(page)])):
        monkeypatch.setattr(sys, "argv", ["train.py", *words, *more])
        names["model"] = module
        snippet("Scripts with HfArgumentParser", names)["trainer"].train()
    assert same(model, plain)
    assert not isinstance(plain, Rockmate)
    assert "<svg" in page.read_text("utf-8")


def test_timm() -> None:
    timm = pytest.importorskip("timm", reason="timm is a test extra")
    for part in ("loss", "optim", "utils"):
        pytest.importorskip(f"timm.{part}", reason="timm is a test extra")
    args = SimpleNamespace(model="test_vit", num_classes=4)
    torch.manual_seed(0)
    names = {"timm": timm, "rockmate": rockmate, "args": args}
    model = snippet("timm", names, budget=0.98)["model"]  # its only attention is its peak
    torch.manual_seed(0)
    plain = timm.create_model(args.model, num_classes=args.num_classes)
    for module in (model, plain):  # as train.py goes on
        optimizer = timm.optim.create_optimizer_v2(module, opt="sgd", lr=0.1)
        average = timm.utils.ModelEmaV3(module, decay=0.9)
        torch.manual_seed(1)
        for _ in range(3):
            images = torch.randn(4, 3, 160, 160)
            timm.loss.LabelSmoothingCrossEntropy()(module(images), torch.arange(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(module)
    assert same(model, plain)


def test_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is no test extra")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is a test extra")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    plain, schedule = deepcopy(unet), diffusers.DDPMScheduler()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    for module in (unet, plain):  # as train_unconditional.py goes
        optimizer = torch.optim.AdamW(module.parameters())
        names = {"rockmate": rockmate, "unet": module, "optimizer": optimizer}
        if module is unet:
            snippet("diffusers", {**names, "accelerator": accelerator})
        torch.manual_seed(0)
        for _ in range(3):
            clean, noise, steps = *torch.randn(2, 4, 3, 16, 16), torch.randint(0, 1000, (4,))
            found = module(schedule.add_noise(clean, noise, steps), steps).sample
            accelerator.backward(nn.functional.mse_loss(found, noise))
            optimizer.step()
            optimizer.zero_grad()
    assert same(unet, plain)


def test_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl brings a large data library")
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({str(k): k for k in range(90)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="1"
    )
    dataset = pytest.importorskip("datasets", reason="trl brings it").Dataset.from_list(
        [{"input_ids": row.tolist()} for row in Texts(18, 16).ids[:8]]
    )
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        bf16=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = hugging_face_gpt2()
    plain = deepcopy(model)
    names = {"trl": trl, "arguments": arguments, "dataset": dataset, "tokenizer": tokenizer}
    snippet("TRL", {**names, "model": model}, budget=0.99)  # one chunk of its loss is the peak
    trl.SFTTrainer(plain, args=arguments, train_dataset=dataset, processing_class=tokenizer).train()
    assert same(model, plain)


class Attention(nn.Module):
    """In place of torchtitan's own, which trains on GPUs only."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        result = nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=given["scale"], enable_gqa=given["enable_gqa"]
        )
        return result.transpose(1, 2)


def test_torchtitan() -> None:
    reason = "torchtitan needs triton, which needs a GPU"
    pytest.importorskip("torchtitan", reason=reason)
    llama3 = pytest.importorskip("torchtitan.models.llama3", reason=reason)
    torch.manual_seed(0)
    model = llama3.model_registry("debugmodel").model.build()
    for layer in model.layers.values():
        layer.attention.inner_attention = Attention()
    model.init_states(buffer_device=torch.device("cpu"))
    plain, sample = deepcopy(model), torch.randint(0, 200, (2, 64))
    names = snippet("torchtitan", {"rockmate": rockmate, "model": model, "sample": sample})
    assert names["plan"].measured_peak_bytes <= names["plan"].budget_bytes
    for module in (model, plain):
        module(sample).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["environment", "arguments"])
def test_the_command_line_of_lightning(
    by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is a test extra")
    cli = pytest.importorskip("lightning.pytorch.cli", reason="lightning is a test extra")
    pytest.importorskip("jsonargparse", reason="Lightning's CLI needs jsonargparse, no test extra")

    class Task(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.network(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=32)

    arguments = ["main.py", "fit", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    arguments += ["--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    monkeypatch.delenv("ROCKMATE_MEMORY", raising=False)
    if by == "environment":
        monkeypatch.setenv("ROCKMATE_BUDGET", "1MiB")
        from rockmate.integrations.lightning import callbacks_by_environment as factory

        # As its entry point does, which an older install may not have.
        monkeypatch.setattr(
            "lightning.pytorch.trainer.connectors.callback_connector._load_external_callbacks",
            lambda group: factory(),
        )
    else:
        monkeypatch.delenv("ROCKMATE_BUDGET", raising=False)
        arguments += ["--trainer.callbacks=rockmate.integrations.lightning.LightningCallback"]
        arguments += ["--trainer.callbacks.budget=1MiB"]
    monkeypatch.setattr(sys, "argv", arguments)
    task = cli.LightningCLI(Task).model
    assert isinstance(task.network, Rockmate)
    assert task.network.budget_bytes == 1 << 20
