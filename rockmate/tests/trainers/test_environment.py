"""An amount of memory from the environment, where a trainer's switch is given none."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

from rockmate import ArgumentsError, Rockmate

NAMES = ("ROCKMATE_BUDGET", "ROCKMATE_MEMORY")


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.filterwarnings("ignore")  # of the trainers
@pytest.mark.parametrize("name", ["RockmateCallback", "LightningCallback"])
def test_what_is_given_goes_before_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"RockmateCallback": "transformers", "LightningCallback": "lightning"}[name]
    pytest.importorskip(library, reason=f"{library} is a test extra")
    switch = resolve_name(f"rockmate.integrations.{name}")
    with pytest.raises(ArgumentsError, match="needs a budget"):
        switch()
    monkeypatch.setenv("ROCKMATE_MEMORY", "24GB")
    assert [switch().options[key] for key in ("budget", "memory")] == [None, "24GB"]
    assert switch("8GB").options["memory"] is None
    monkeypatch.setenv("ROCKMATE_BUDGET", "8GB")
    with pytest.raises(ArgumentsError, match="got both"):
        switch()


@pytest.mark.filterwarnings("ignore")
def test_lightning_finds_its_switch_where_an_amount_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is a test extra")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    found = re.search(r'lightning.pytorch.callbacks_factory"\]\nrockmate = "(.*)"\n', project)
    assert found is not None
    factory = resolve_name(found[1])
    assert factory() == []
    monkeypatch.setenv("ROCKMATE_BUDGET", "1MiB")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.network(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = Task()
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=factory(),
    )
    trainer.fit(task, torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=32))
    assert isinstance(task.network, Rockmate)
    assert task.network.budget_bytes == 1 << 20
