"""Models of transformers, by a table of configurations, and what peft and others put on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import graphs.breadth_cases as breadth_cases  # declares torchvision's operators, too
from graphs.user_models.batches import (
    WORDS,
    Built,
    answers,
    causal,
    classes,
    drawn,
    keywords,
    marked,
    pair,
    pictures,
    seeded,
    sounds,
    spoken,
    tokens,
)

_TEXT: dict[str, Any] = {
    **{k: v for k, v in breadth_cases.TEXT.items() if not k.endswith("_token_id")},
    "vocab_size": WORDS,
    "pad_token_id": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "state_size": 4,
}
_CAUSAL = "ForCausalLM"
_SORTED = "ForSequenceClassification"
_SEEN = "ForImageClassification"
_ViT = breadth_cases.VISION
_STAGES = breadth_cases.STAGES
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]}
_SWIN.update({"num_heads": [2, 2], "window_size": 4})
_SPEECH = {k: v for k, v in breadth_cases.SPEECH.items() if k != "apply_spec_augment"}
_SPEECH["vocab_size"] = 32
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
_LATENT.update({"qk_nope_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4})
_LATENT.update({"n_group": 1, "topk_group": 1, "num_key_value_heads": 4})
_SEGMENTS = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2]}
_SEGMENTS.update({"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [7, 3]})
_SEGMENTS.update({"strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16})
_HYBRID = {"use_mamba_kernels": False, "mamba_d_state": 4, "attn_layer_period": 2}
_HYBRID.update({"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1})
_LONGER = {"max_position_embeddings": 70}
_START = {"decoder_start_token_id": 1}
# Configuration, what follows it in the name of the model, batch, and what else to configure.
TRANSFORMERS: list[tuple[str, str, Callable[[int], dict[str, Any]], Mapping[str, Any]]] = [
    ("Bert", _SORTED, classes, {}),
    ("Bert", "ForMaskedLM", causal, {}),
    ("Bert", "ForQuestionAnswering", answers, {}),
    ("GPT2", "LMHeadModel", causal, {}),
    ("Llama", _CAUSAL, causal, {}),
    ("T5", "ForConditionalGeneration", pair, _START),
    ("Bart", "ForConditionalGeneration", pair, _START),
    ("ViT", _SEEN, pictures, _ViT),
    ("Wav2Vec2", _SORTED, sounds, _SPEECH),
    ("Qwen3Moe", _CAUSAL, causal, {}),
    ("Mixtral", _CAUSAL, causal, {}),
    ("DeepseekV3", _CAUSAL, causal, _LATENT),
    ("GptOss", _CAUSAL, causal, {"intermediate_size": 32}),
    ("Jamba", _CAUSAL, causal, _HYBRID),
    ("Swin", _SEEN, pictures, _SWIN),
    ("Roberta", "ForTokenClassification", marked, _LONGER),
    ("DistilBert", _SORTED, classes, {}),
    ("Albert", _SORTED, classes, {}),
    ("Electra", "ForTokenClassification", marked, {}),
    ("DebertaV2", _SORTED, classes, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("MPNet", _SORTED, classes, _LONGER),
    ("ModernBert", _SORTED, classes, {"cls_token_id": 1, "sep_token_id": 1}),
    ("XLMRoberta", _SORTED, classes, _LONGER),
    ("Camembert", "ForMaskedLM", causal, _LONGER),
    ("Funnel", _SORTED, classes, {"block_sizes": [1, 1], "num_decoder_layers": 1}),
    ("Mistral", _CAUSAL, causal, {}),
    ("Qwen2", _CAUSAL, causal, {}),
    ("Qwen3", _CAUSAL, causal, {}),
    ("Gemma", _CAUSAL, causal, {}),
    ("Gemma2", _CAUSAL, causal, {}),
    ("Gemma3Text", _CAUSAL, causal, {}),
    ("Phi", _CAUSAL, causal, {}),
    ("Phi3", _CAUSAL, causal, {}),
    ("GPTNeoX", _CAUSAL, causal, {}),
    ("GPTNeo", _CAUSAL, causal, {"attention_types": [[["global", "local"], 1]]}),
    ("GPTJ", _CAUSAL, causal, {"rotary_dim": 4}),
    ("OPT", _CAUSAL, causal, {"word_embed_proj_dim": 32}),
    ("Bloom", _CAUSAL, causal, {}),
    ("Falcon", _CAUSAL, causal, {}),
    ("CodeGen", _CAUSAL, causal, {"rotary_dim": 4}),
    ("StableLm", _CAUSAL, causal, {}),
    ("Starcoder2", _CAUSAL, causal, {}),
    ("Olmo2", _CAUSAL, causal, {}),
    ("Cohere", _CAUSAL, causal, {}),
    ("Granite", _CAUSAL, causal, {}),
    ("SmolLM3", _CAUSAL, causal, {}),
    ("Mamba", _CAUSAL, causal, {}),
    ("XLNet", _SORTED, classes, {}),
    ("Reformer", _SORTED, classes, {"axial_pos_embds": False, "is_decoder": False}),
    ("Longformer", _SORTED, classes, {"attention_window": 8, **_LONGER}),
    ("MT5", "ForConditionalGeneration", pair, _START),
    ("MBart", "ForConditionalGeneration", pair, _START),
    ("Pegasus", "ForConditionalGeneration", pair, _START),
    ("Marian", "MTModel", pair, {**_START, "decoder_vocab_size": WORDS}),
    ("Blenderbot", "ForConditionalGeneration", pair, _START),
    ("M2M100", "ForConditionalGeneration", pair, _START),
    ("SwitchTransformers", "ForConditionalGeneration", pair, _START),
    ("DeiT", _SEEN, pictures, _ViT),
    ("Beit", _SEEN, pictures, _ViT),
    ("Dinov2", _SEEN, pictures, _ViT),
    ("Swinv2", _SEEN, pictures, _SWIN),
    ("ConvNext", _SEEN, pictures, {**_STAGES, "num_stages": 2}),
    ("ConvNextV2", _SEEN, pictures, {**_STAGES, "num_stages": 2}),
    ("ResNet", _SEEN, pictures, {**_STAGES, "embedding_size": 8}),
    ("RegNet", _SEEN, pictures, {**_STAGES, "groups_width": 8}),
    ("MobileNetV2", _SEEN, pictures, {"depth_multiplier": 0.25}),
    ("MobileViT", _SEEN, pictures, {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8] * 7}),
    ("Segformer", "ForSemanticSegmentation", drawn, _SEGMENTS),
    ("Hubert", _SORTED, sounds, _SPEECH),
    ("WavLM", _SORTED, sounds, _SPEECH),
    ("Wav2Vec2", "ForCTC", spoken, _SPEECH),
]


def from_transformers(config: str, model: str, make: Any, extra: Mapping[str, Any]) -> Built:
    """Return a row of `TRANSFORMERS`."""
    import transformers

    configured = breadth_cases.configured(config, _TEXT, extra)
    name = config.removesuffix("Text") if config == "Marian" else config
    name = {"Gemma3Text": "Gemma3"}.get(name, name)
    return getattr(transformers, name + model)(configured).train(), keywords(make)


def clip() -> Built:
    """Return a model of pictures and texts, with its loss."""
    import transformers

    model, _, _ = breadth_cases.encoder_decoder_cases()[-1].build()
    assert isinstance(model, transformers.CLIPModel)

    def batch(step: int) -> dict[str, Any]:
        text = tokens(step)
        text["input_ids"] = text["input_ids"][:2] % 60 + 2
        text["attention_mask"] = text["attention_mask"][:2]
        return {**text, "pixel_values": pictures(step)["pixel_values"], "return_loss": True}

    return model, keywords(batch)


def whisper() -> Built:
    """Return a model that writes down what is said."""
    import transformers

    sizes = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16}
    config = breadth_cases.configured("Whisper", _TEXT, {**sizes, **_START})

    def batch(step: int) -> dict[str, Any]:
        sound = torch.randn(2, 8, 40, generator=seeded(step))
        labels = torch.randint(3, WORDS, (2, 8), generator=seeded(step))
        return {"input_features": sound, "labels": labels}

    return transformers.WhisperForConditionalGeneration(config).train(), keywords(batch)


def adapted(name: str) -> Built:
    """Return a Llama with an adapter of peft."""
    import peft

    model, batch = from_transformers("Llama", _CAUSAL, causal, {})
    targets = {"target_modules": ["q_proj", "v_proj"]}
    kind = {"task_type": "CAUSAL_LM"}
    config = {
        "LoRA": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, **targets, **kind),
        "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **targets, **kind),
        "LoHa": lambda: peft.LoHaConfig(r=4, **targets, task_type="CAUSAL_LM"),
        "LoKr": lambda: peft.LoKrConfig(r=4, **targets, task_type="CAUSAL_LM"),
        "IA3": lambda: peft.IA3Config(
            feedforward_modules=["down_proj"],
            target_modules=["k_proj", "v_proj", "down_proj"],
            **kind,
        ),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **kind),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **kind),
    }[name]()
    return peft.get_peft_model(model, config).train(), batch


def sentences() -> Built:
    """Return a bi-encoder and its loss."""
    import transformers
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Loss(nn.Module):
        """A bi-encoder trained on the similarity of pairs, as sentence_transformers' loss."""

        def __init__(self) -> None:
            super().__init__()
            config = breadth_cases.configured("Bert", _TEXT, {})
            self.bert = transformers.BertModel(config)
            self.pooling = Pooling(32, pooling_mode="mean")

        def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
            found = []
            for features in (first, second):
                states = self.bert(**features).last_hidden_state
                given = {"token_embeddings": states, **features}
                found.append(self.pooling(given)["sentence_embedding"])
            scores = nn.functional.cosine_similarity(found[0][:, None], found[1][None], dim=-1)
            return nn.functional.cross_entropy(20 * scores, torch.arange(len(scores)))

    return Loss().train(), lambda step: ((tokens(step), tokens(step + 10)), {})
