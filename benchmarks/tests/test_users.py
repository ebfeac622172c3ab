"""Models of packages train as their users call them, and the table says what the rows say."""

from __future__ import annotations

import pytest

from graphs import users
from graphs.user_models.batches import UserModel
from graphs.user_models.table import MODELS
from reports import readme

PACKAGES = ("transformers", "torchvision")
# Quick ones of many kinds: encoders, decoders, mixtures of experts, both at once, images, sound.
SAMPLE = (
    *("BertForSequenceClassification", "BertForMaskedLM", "DistilBertForSequenceClassification"),
    *("ModernBertForSequenceClassification", "RobertaForTokenClassification"),
    *("ElectraForTokenClassification", "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM", "OPTForCausalLM"),
    *("GPTNeoXForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM"),
    *("T5ForConditionalGeneration", "ViTForImageClassification", "SwinForImageClassification"),
    *("ConvNextForImageClassification", "resnet18", "vgg11_bn", "squeezenet1_1"),
    "mobilenet_v3_small",
)
CHOSEN = [model for model in MODELS if model.package in PACKAGES and model.name in SAMPLE]


def test_the_sample_is_one_of_the_table() -> None:
    assert len(CHOSEN) == len(SAMPLE) == 25


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.name, marks=[pytest.mark.nightly] if place % 3 else [])
        for place, model in enumerate(CHOSEN)
    ],
)
def test_a_model_trains_as_plain_pytorch_does(model: UserModel) -> None:
    pytest.importorskip(model.package)
    row = users.check(model)
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
