"""The modules that breadth.py tries: Hugging Face, torchvision, torch's own, and traps."""

from __future__ import annotations

import functools
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from graphs.breadth_modules import FEATURES
from harness.missing_operators import declare_missing_operators

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class BreadthCase:
    """One module on one sample; cases with one `title` are shown together."""

    group: str
    name: str
    title: str
    build: Callable[[], Built]


declare_missing_operators()

# Every text model gets the sizes that its configuration knows by these names.
TEXT: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "d_inner"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    "num_key_value_heads": 2,
    "d_kv": 8,
    "head_dim": 8,
}

_EAGER = {"attn_implementation": "eager"}
_BATCHED = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
_LAYER_DROP = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def configured(name: str, sizes: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """Return a small configuration: the sizes that its class knows, and what the case adds."""
    import transformers

    kind = getattr(transformers, f"{name}Config")
    aliases = getattr(kind, "attribute_map", {})
    plain = vars(kind())
    known = {k: v for k, v in sizes.items() if k in plain and k not in aliases}
    return kind(**{**known, **extra})


def _hugging(
    config: str, model: str, inputs: Callable[[], dict[str, Any]], **extra: Any
) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        # A cache is for generation, not for training.
        sizes = {**TEXT, **_LAYER_DROP, "use_cache": False}
        made = getattr(transformers, model)(configured(config, sizes, extra))
        return made.train(), (), inputs()

    return build


def _ids(length: int = 16) -> dict[str, Any]:
    return {"input_ids": torch.randint(2, 64, (2, length))}


def _labelled_ids() -> dict[str, Any]:
    return {**_ids(), "labels": torch.randint(2, 64, (2, 16))}


def _padded_ids() -> dict[str, Any]:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {**_labelled_ids(), "attention_mask": mask}


def _broad_mask() -> dict[str, Any]:
    mask = _padded_ids()["attention_mask"][:, None, None, :].expand(2, 1, 16, 16).bool()
    return {**_labelled_ids(), "attention_mask": mask}


def _causal() -> dict[str, Any]:
    ids = torch.randint(2, 64, (2, 16))
    return {"input_ids": ids, "labels": ids}


def _pair() -> dict[str, Any]:
    return {**_ids(), "labels": torch.randint(2, 64, (2, 12))}


def _image(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 2000)}


SPEECH: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,  # its masks are drawn with numpy
}

VISION: dict[str, Any] = {"image_size": 32, "patch_size": 8}
STAGES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1]}


def text_cases() -> list[BreadthCase]:
    """Encoders and decoders of text."""
    rows: list[tuple[str, str, Callable[[], dict[str, Any]], dict[str, Any]]] = [
        ("GPT2", "GPT2LMHeadModel", _causal, {}),
        ("Bert", "BertForMaskedLM", _labelled_ids, {}),
        ("Roberta", "RobertaForMaskedLM", _labelled_ids, {"max_position_embeddings": 70}),
        ("DistilBert", "DistilBertForMaskedLM", _labelled_ids, {}),
        ("Albert", "AlbertForMaskedLM", _labelled_ids, {}),
        ("Electra", "ElectraForMaskedLM", _labelled_ids, {}),
        ("DebertaV2", "DebertaV2ForMaskedLM", _labelled_ids, {}),
        ("MPNet", "MPNetForMaskedLM", _labelled_ids, {"max_position_embeddings": 70}),
        ("FNet", "FNetModel", _ids, {}),
        ("ModernBert", "ModernBertForMaskedLM", _labelled_ids, {}),
        ("Llama", "LlamaForCausalLM", _causal, {}),
        ("Mistral", "MistralForCausalLM", _causal, {}),
        ("Qwen2", "Qwen2ForCausalLM", _causal, {}),
        ("Qwen3", "Qwen3ForCausalLM", _causal, {}),
        ("Gemma", "GemmaForCausalLM", _causal, {}),
        ("Gemma2", "Gemma2ForCausalLM", _causal, {}),
        ("Phi", "PhiForCausalLM", _causal, {}),
        ("GPTNeoX", "GPTNeoXForCausalLM", _causal, {}),
        ("GPTNeo", "GPTNeoForCausalLM", _causal, {"attention_types": [[["global", "local"], 1]]}),
        ("OPT", "OPTForCausalLM", _causal, {"word_embed_proj_dim": 32}),
        ("Bloom", "BloomForCausalLM", _causal, {}),
        ("Falcon", "FalconForCausalLM", _causal, {}),
        ("CodeGen", "CodeGenForCausalLM", _causal, {"rotary_dim": 4}),
        ("XLNet", "XLNetLMHeadModel", _ids, {}),
        ("Mamba", "MambaForCausalLM", _causal, {"state_size": 4}),
        ("Mixtral", "MixtralForCausalLM", _causal, {"num_local_experts": 4}),
        ("Longformer", "LongformerForMaskedLM", _ids, {"attention_window": 8}),
        ("Reformer", "ReformerModel", _ids, {"axial_pos_embds": False, "hash_seed": 1}),
    ]
    variants: list[tuple[str, str, str, Callable[[], dict[str, Any]], dict[str, Any]]] = [
        ("padding mask", "Bert", "BertForMaskedLM", _padded_ids, {}),
        ("mask of 4 dimensions", "Bert", "BertForMaskedLM", _broad_mask, {}),
        ("padding mask", "GPT2", "GPT2LMHeadModel", _padded_ids, {}),
        ("padding mask, eager attention", "GPT2", "GPT2LMHeadModel", _padded_ids, _EAGER),
        ("batched experts", "Mixtral", "MixtralForCausalLM", _causal, _BATCHED),
    ]
    return [
        BreadthCase("text", model, model, _hugging(config, model, inputs, **extra))
        for config, model, inputs, extra in rows
    ] + [
        BreadthCase(
            "text", f"{model}, {what}", f"{model}, {what}", _hugging(config, model, inputs, **more)
        )
        for what, config, model, inputs, more in variants
    ]


def vision_cases() -> list[BreadthCase]:
    """Networks on images."""
    swin = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]}
    swin.update({"num_heads": [2, 2], "window_size": 4})
    seg = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2]}
    seg.update({"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [7, 3]})
    seg.update({"strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16})
    rows: list[tuple[str, str, Callable[[], dict[str, Any]], dict[str, Any]]] = [
        ("ViT", "ViTForImageClassification", _image, VISION),
        ("DeiT", "DeiTForImageClassification", _image, VISION),
        ("Beit", "BeitForImageClassification", _image, VISION),
        ("Dinov2", "Dinov2Model", _image, VISION),
        ("Swin", "SwinForImageClassification", _image, swin),
        ("ConvNext", "ConvNextForImageClassification", _image, {**STAGES, "num_stages": 2}),
        ("ResNet", "ResNetForImageClassification", _image, {**STAGES, "embedding_size": 8}),
        ("RegNet", "RegNetForImageClassification", _image, {**STAGES, "groups_width": 8}),
        ("MobileNetV2", "MobileNetV2ForImageClassification", _image, {"depth_multiplier": 0.25}),
        ("Segformer", "SegformerForSemanticSegmentation", _image, seg),
        ("PoolFormer", "PoolFormerForImageClassification", lambda: _image(64), {}),
    ]
    return [
        BreadthCase("vision", model, model, _hugging(config, model, inputs, **extra))
        for config, model, inputs, extra in rows
    ]


def speech_cases() -> list[BreadthCase]:
    """Networks on sound."""

    def whisper() -> dict[str, Any]:
        ids = torch.randint(2, 64, (2, 8))
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}

    def spectrogram() -> dict[str, Any]:
        return {"input_values": torch.randn(2, 32, 16)}

    sizes = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16}
    patches = {"num_mel_bins": 16, "max_length": 32, "patch_size": 8}
    patches.update({"frequency_stride": 8, "time_stride": 8})
    rows: list[tuple[str, str, Callable[[], dict[str, Any]], dict[str, Any]]] = [
        ("Wav2Vec2", "Wav2Vec2Model", _sound, SPEECH),
        ("Hubert", "HubertModel", _sound, SPEECH),
        ("WavLM", "WavLMModel", _sound, SPEECH),
        ("Whisper", "WhisperForConditionalGeneration", whisper, sizes),
        ("ASTransformer", "ASTForAudioClassification", spectrogram, patches),
    ]
    names = {"ASTransformer": "AST"}
    return [
        BreadthCase(
            "speech", model, model, _hugging(names.get(config, config), model, inputs, **extra)
        )
        for config, model, inputs, extra in rows
    ]


def encoder_decoder_cases() -> list[BreadthCase]:
    """Networks with an encoder and a decoder, or two towers."""

    def clip() -> dict[str, Any]:
        return {**_ids(), **_image(), "return_loss": True}

    def clip_model() -> Built:
        import transformers

        text = configured("CLIPText", TEXT, {"projection_dim": 16, "eos_token_id": 63})
        vision = configured("CLIPVision", TEXT, {**VISION, "projection_dim": 16})
        config = transformers.CLIPConfig(
            text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16
        )
        return transformers.CLIPModel(config).train(), (), clip()

    start = {"decoder_start_token_id": 1}
    rows: list[tuple[str, str, Callable[[], dict[str, Any]], dict[str, Any]]] = [
        ("T5", "T5ForConditionalGeneration", _pair, start),
        ("MT5", "MT5ForConditionalGeneration", _pair, start),
        ("Bart", "BartForConditionalGeneration", _pair, start),
        ("MBart", "MBartForConditionalGeneration", _pair, start),
        ("Pegasus", "PegasusForConditionalGeneration", _pair, start),
        ("Marian", "MarianMTModel", _pair, start),
        ("Blenderbot", "BlenderbotForConditionalGeneration", _pair, start),
        ("LED", "LEDForConditionalGeneration", _pair, {**start, "attention_window": 8}),
    ]
    cases = [
        BreadthCase("encoder-decoder", model, model, _hugging(config, model, inputs, **extra))
        for config, model, inputs, extra in rows
    ]
    return [*cases, BreadthCase("encoder-decoder", "CLIPModel", "CLIPModel", clip_model)]


def torchvision_cases() -> list[BreadthCase]:
    """Image classifiers of torchvision."""

    def build(name: str, size: int) -> Built:
        import torchvision

        options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        model = getattr(torchvision.models, name)(num_classes=10, **options)
        return model.train(), (torch.randn(2, 3, size, size),), {}

    names = ("resnet18", "resnet101", "regnet_x_400mf", "mobilenet_v3_small", "efficientnet_b0")
    names += ("densenet121", "googlenet", "squeezenet1_1", "shufflenet_v2_x0_5", "convnext_tiny")
    return [
        BreadthCase("torchvision", name, name, functools.partial(build, name, 64)) for name in names
    ]


def module_cases(most: int = 4) -> list[BreadthCase]:
    """Every module of torch's own test database, on at most `most` of its samples each."""
    for module, kind in (("expecttest", unittest.TestCase),):
        if module not in sys.modules:  # torch's tests inherit from it; the database needs nothing
            sys.modules[module] = types.ModuleType(module)
            sys.modules[module].TestCase = kind  # type: ignore[attr-defined]
    from torch.testing._internal.common_modules import module_db

    cases = []
    for info in module_db:
        dtype = torch.float32 if torch.float32 in info.dtypes else info.dtypes[0]
        samples = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=True
        )
        step = max(1, len(samples) // most)
        for number in range(0, min(len(samples), most * step), step):
            build = functools.partial(_sample, info, dtype, number)
            cases.append(BreadthCase("torch.nn", f"{info.name} {number}", info.name, build))
    return cases


def _sample(info: Any, dtype: torch.dtype, number: int) -> Built:
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=True
    )
    made, call = samples[number].constructor_input, samples[number].forward_input
    model = info.module_cls(*made.args, **made.kwargs).to(dtype).train()
    if isinstance(model, LazyModuleMixin):  # its parameters get their shapes from its first input
        model(*call.args, **call.kwargs)
    return model, tuple(call.args), dict(call.kwargs)


def feature_cases() -> list[BreadthCase]:
    """Small modules, each with one thing that is easy to get wrong."""

    def build(make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> Built:
        model, args, kwargs = make()
        return model.train(), args, kwargs

    return [
        BreadthCase("features", title, title, functools.partial(build, make))
        for title, make in FEATURES.items()
    ]


GROUPS: dict[str, Callable[[], list[BreadthCase]]] = {
    "features": feature_cases,
    "text": text_cases,
    "vision": vision_cases,
    "speech": speech_cases,
    "encoder-decoder": encoder_decoder_cases,
    "torchvision": torchvision_cases,
    "torch.nn": module_cases,
}
