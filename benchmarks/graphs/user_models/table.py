"""The rows of the table: package, name and builder of every model."""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphs.user_models.batches import Built, UserModel
from graphs.user_models.hugging_face import (
    TRANSFORMERS,
    adapted,
    clip,
    from_transformers,
    sentences,
    whisper,
)
from graphs.user_models.others import (
    from_torchaudio,
    from_x_transformers,
    graph,
    ode,
    of_small_package,
    operator,
    performer,
    tabular,
)
from graphs.user_models.vision import (
    OF_TIMM,
    OF_TORCHVISION,
    diffusion,
    from_diffusers,
    from_monai,
    from_smp,
    from_timm,
    from_torchvision,
    from_vit_pytorch,
    open_clip_model,
    segmenting,
    video,
)


def all_models() -> list[UserModel]:
    """Return every row."""
    part = functools.partial
    found = []
    for config, model, make, extra in TRANSFORMERS:
        build = part(from_transformers, config, model, make, extra)
        found.append(UserModel("transformers", config + model, build))
    found.append(UserModel("transformers", "CLIPModel", clip))
    found.append(UserModel("transformers", "WhisperForConditionalGeneration", whisper))
    found += [
        UserModel("torchvision", name, part(from_torchvision, name, size))
        for name, size in OF_TORCHVISION
    ]
    found += [
        UserModel("torchvision", name, part(segmenting, name))
        for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
    ]
    found.append(UserModel("torchvision", "r3d_18", part(video, "r3d_18")))
    found += [
        UserModel("timm", name, part(from_timm, name, size, options))
        for name, size, options in OF_TIMM
    ]
    diffusing = ("UNet2DModel", "UNet2DConditionModel", "DiTTransformer2DModel")
    diffusing += ("SD3Transformer2DModel", "AutoencoderKL", "VQModel")
    found += [UserModel("diffusers", name, part(from_diffusers, name)) for name in diffusing]
    adapters = ("LoRA", "DoRA", "LoHa", "LoKr", "IA3", "prefix", "prompt")
    found += [UserModel("peft", f"Llama with {name}", part(adapted, name)) for name in adapters]
    found += [
        UserModel("torch_geometric", f"{name}Conv", part(graph, name, name in ("GCN", "GIN")))
        for name in ("GCN", "GAT", "SAGE", "GIN", "Graph", "Transformer")
    ]
    rows: list[tuple[str, Callable[[str], Built], tuple[str, ...]]] = [
        ("segmentation_models_pytorch", from_smp, ("Unet", "FPN", "Linknet")),
        ("monai", from_monai, ("UNet", "UNETR", "SegResNet", "AttentionUnet", "DenseNet121")),
        ("vit_pytorch", from_vit_pytorch, ("ViT", "SimpleViT", "CaiT", "DeepViT", "MAE", "CvT")),
        (
            "x_transformers",
            from_x_transformers,
            ("rotary", "ALiBi", "layer dropout", "GLU and RMSNorm"),
        ),
        (
            "torchaudio",
            from_torchaudio,
            ("Conformer", "ConvTasNet", "DeepSpeech", "Wav2Letter", "mel spectrogram and Conv1d"),
        ),
        ("efficientnet_pytorch", of_small_package, ("EfficientNet-b0",)),
        ("pytorch_tcn", of_small_package, ("TCN",)),
        ("vector_quantize_pytorch", of_small_package, ("VectorQuantize", "FSQ")),
        ("linear_attention_transformer", of_small_package, ("LinearAttentionTransformerLM",)),
        ("local_attention", of_small_package, ("LocalTransformer",)),
        ("reformer_pytorch", of_small_package, ("ReformerLM",)),
        ("mambapy", of_small_package, ("Mamba",)),
        ("conformer", of_small_package, ("ConformerBlock",)),
        ("perceiver_pytorch", of_small_package, ("Perceiver",)),
        ("speechbrain", of_small_package, ("ECAPA_TDNN",)),
    ]
    found += [
        UserModel(package, name, part(build, name))
        for package, build, names in rows
        for name in names
    ]
    single: list[tuple[str, str, Callable[[], Built]]] = [
        ("sentence_transformers", "pairs of sentences", sentences),
        ("open_clip", "CLIP", open_clip_model),
        ("denoising_diffusion_pytorch", "GaussianDiffusion", diffusion),
        ("performer_pytorch", "PerformerLM", performer),
        ("tab_transformer_pytorch", "FTTransformer", tabular),
        ("neuralop", "FNO", operator),
        ("torchdiffeq", "odeint, rk4", ode),
    ]
    found += [UserModel(package, name, build) for package, name, build in single]
    return found


MODELS = all_models()
