"""Models of packages train as their users call them, and the table says what the rows say."""

from __future__ import annotations

import pytest

from graphs import users
from graphs.user_models.batches import UserModel
from graphs.user_models.table import MODELS
from reports import readme

# Quick ones of many kinds: encoders, decoders, mixtures of experts, both at once, images, sound.
SAMPLE = {
    "transformers": (
        *("ResNetForImageClassification", "ConvNextForImageClassification"),
        *("RegNetForImageClassification", "Swinv2ForImageClassification", "BloomForCausalLM"),
        *("DebertaV2ForSequenceClassification", "FalconForCausalLM", "Gemma2ForCausalLM"),
        *("Dinov2ForImageClassification", "GPTNeoForCausalLM", "BeitForImageClassification"),
        *("LongformerForSequenceClassification", "GPTJForCausalLM", "Qwen3MoeForCausalLM"),
        *("GptOssForCausalLM", "ViTForImageClassification", "Wav2Vec2ForCTC"),
        "WhisperForConditionalGeneration",
    ),
    "timm": (
        *("deit_tiny_distilled_patch16_224", "vit_tiny_patch16_224", "convnext_atto"),
        "mixer_s32_224",
    ),
    "peft": ("Llama with prefix",),
    "torchvision": ("vgg11", "squeezenet1_1"),
}
CHOSEN = [model for model in MODELS if model.name in SAMPLE.get(model.package, ())]


def test_the_sample_is_one_of_the_table() -> None:
    assert len(CHOSEN) == sum(map(len, SAMPLE.values())) == 25


@pytest.mark.one_in(5)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", CHOSEN, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "fraction", [0.6, pytest.param(1.0, marks=pytest.mark.nightly)], ids=["less", "all"]
)
def test_a_model_trains_as_plain_pytorch_does(model: UserModel, fraction: float) -> None:
    pytest.importorskip(model.package)
    row = users.check(model, (fraction,))
    assert row["status"] in (users.EXACT, users.PIECES), row["message"]


def test_the_table_is_what_the_rows_say() -> None:
    rows = list(users.read().values())
    text = users.README.read_text(encoding="utf-8")
    assert readme.part(text, "users") == users.table(rows)


def test_nothing_trains_wrongly_and_most_is_exact() -> None:
    rows = [row for row in users.read().values() if row["status"] != "not tried"]
    assert not [row["model"] for row in rows if row["status"] in ("wrong", "over budget")]
    assert len(rows) >= 100
    assert len({row["package"] for row in rows}) >= 15
