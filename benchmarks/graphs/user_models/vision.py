"""Models of packages for pictures: classifying, segmenting, diffusing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphs.user_models.batches import WORDS, Built, keywords, random_of, seeded


def from_torchvision(name: str, size: int) -> Built:
    """Return a classifier of torchvision."""
    import torchvision

    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    options |= {"aux_logits": False} if name == "inception_v3" else {}  # it needs 299 pixels
    model = getattr(torchvision.models, name)(num_classes=10, **options)
    if name.startswith("vgg"):  # as on CIFAR: its own classifier has 120 million parameters
        model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 10)
    return model.train(), random_of(2, 3, size, size)


def segmenting(name: str) -> Built:
    """Return a model of torchvision that marks each pixel."""
    import torchvision

    make = getattr(torchvision.models.segmentation, name)
    return make(weights=None, weights_backbone=None, num_classes=3).train(), random_of(2, 3, 64, 64)


def video(name: str) -> Built:
    """Return a model of torchvision for films."""
    import torchvision

    model = getattr(torchvision.models.video, name)(num_classes=5)
    return model.train(), random_of(2, 3, 4, 32, 32)


def from_timm(name: str, size: int, options: Mapping[str, Any]) -> Built:
    """Return a classifier of timm."""
    import timm

    model = timm.create_model(name, num_classes=10, **options)
    return model.train(), random_of(2, 3, size, size)


OF_TIMM: list[tuple[str, int, Mapping[str, Any]]] = [
    ("resnet10t", 64, {}),
    ("resnet18", 64, {"drop_path_rate": 0.1}),
    ("vit_tiny_patch16_224", 32, {"img_size": 32, "depth": 2, "drop_path_rate": 0.1}),
    ("deit_tiny_distilled_patch16_224", 32, {"img_size": 32, "depth": 2}),
    ("convnext_atto", 64, {"depths": (1, 1, 1, 1), "drop_path_rate": 0.1}),
    ("mixer_s32_224", 64, {"img_size": 64}),
    ("mobilenetv3_small_050", 64, {}),
    ("efficientnet_lite0", 64, {}),
    ("swin_tiny_patch4_window7_224", 56, {"img_size": 56, "embed_dim": 24, "depths": (1, 1, 1, 1)}),
    ("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}),
    ("ghostnet_050", 64, {}),
    ("regnetx_002", 64, {}),
    ("poolformer_s12", 64, {}),
    ("pit_ti_224", 64, {"img_size": 64}),
    ("cait_xxs24_224", 32, {"img_size": 32, "depth": 2}),
    ("xcit_nano_12_p16_224", 32, {"img_size": 32, "depth": 2}),
    ("edgenext_xx_small", 64, {}),
    ("repvgg_a0", 32, {}),
    ("tf_efficientnetv2_b0", 64, {"drop_path_rate": 0.1}),
    ("levit_128s", 224, {}),
]
OF_TORCHVISION = [
    ("resnet18", 64), ("resnet50", 64), ("vgg11_bn", 32), ("vgg11", 32),
    ("mobilenet_v2", 64), ("mobilenet_v3_small", 64), ("efficientnet_b0", 64),
    ("densenet121", 64), ("googlenet", 64), ("inception_v3", 128), ("squeezenet1_1", 64),
    ("shufflenet_v2_x0_5", 64), ("convnext_tiny", 64), ("mnasnet0_5", 64),
    ("regnet_y_400mf", 64), ("resnext50_32x4d", 32), ("swin_t", 64),
]  # fmt: skip


def _noised(model: nn.Module, channels: int, size: int, **more: Any) -> Built:
    def batch(step: int) -> dict[str, Any]:
        generator = seeded(step)
        made = {k: v(generator) if callable(v) else v for k, v in more.items()}
        noise = torch.randn(2, channels, size, size, generator=generator)
        times = torch.randint(1000, (2,), generator=generator)
        key = made.pop("_name", "sample")
        return {key: noise, "timestep": times, **made}

    return model.train(), keywords(batch)


def from_diffusers(name: str) -> Built:
    """Return a model that takes noise away, or a coder."""
    import diffusers

    blocks = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    words = lambda generator: torch.randn(2, 6, 16, generator=generator)  # noqa: E731
    if name == "UNet2DModel":
        downs = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "sample_size": 16}
        ups = {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8}
        return _noised(diffusers.UNet2DModel(**blocks, **downs, **ups), 3, 16)
    if name == "UNet2DConditionModel":
        kinds = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "sample_size": 16}
        ups = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16}
        model = diffusers.UNet2DConditionModel(**blocks, **kinds, **ups, attention_head_dim=4)
        return _noised(model, 4, 16, encoder_hidden_states=words)
    if name == "DiTTransformer2DModel":
        sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
        model = diffusers.DiTTransformer2DModel(**sizes, in_channels=4, sample_size=8)
        labels = lambda generator: torch.randint(1000, (2,), generator=generator)  # noqa: E731
        return _noised(model, 4, 8, _name="hidden_states", class_labels=labels)
    if name == "SD3Transformer2DModel":
        sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
        sizes.update({"joint_attention_dim": 16, "caption_projection_dim": 16, "sample_size": 8})
        sizes.update({"pooled_projection_dim": 16, "in_channels": 4, "out_channels": 4})
        model = diffusers.SD3Transformer2DModel(**sizes)
        pooled = lambda generator: torch.randn(2, 16, generator=generator)  # noqa: E731
        given = {"encoder_hidden_states": words, "pooled_projections": pooled}
        return _noised(model, 4, 8, _name="hidden_states", **given)
    down = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    up = {"up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4}
    if name == "AutoencoderKL":
        return diffusers.AutoencoderKL(**blocks, **down, **up).train(), random_of(2, 3, 16, 16)
    sizes = {**blocks, **down, "up_block_types": up["up_block_types"], "latent_channels": 4}
    model = diffusers.VQModel(**sizes, num_vq_embeddings=16, vq_embed_dim=4)
    return model.train(), random_of(2, 3, 16, 16)


def from_smp(name: str) -> Built:
    """Return a model of segmentation_models_pytorch."""
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)("resnet18", encoder_weights=None, classes=3)
    return model.train(), random_of(2, 3, 64, 64)


def from_monai(name: str) -> Built:
    """Return a network of MONAI for pictures of bodies."""
    from monai.networks import nets

    plane = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    if name == "UNet":
        model = nets.UNet(**plane, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
    elif name == "UNETR":
        sizes = {"img_size": (32, 32), "hidden_size": 32, "mlp_dim": 32, "num_heads": 2}
        model = nets.UNETR(**plane, **sizes, feature_size=4)
    elif name == "SegResNet":
        model = nets.SegResNet(**plane, init_filters=8, dropout_prob=0.1)
    elif name == "AttentionUnet":
        model = nets.AttentionUnet(**plane, channels=(8, 16), strides=(2,))
    else:
        model = nets.DenseNet121(**plane, init_features=8, growth_rate=4, block_config=(2, 2))
    return model.train(), random_of(2, 1, 32, 32)


def from_vit_pytorch(name: str) -> Built:
    """Return a model of vit_pytorch."""
    import importlib

    import vit_pytorch

    sizes = {"image_size": 32, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 32}
    module = {"SimpleViT": "simple_vit", "CaiT": "cait", "DeepViT": "deepvit", "ViT": "vit"}
    module.update({"PiT": "pit", "MAE": "mae", "NesT": "nest", "CvT": "cvt"})
    kind = getattr(importlib.import_module(f"vit_pytorch.{module[name]}"), name)
    if name == "MAE":
        coder = vit_pytorch.ViT(patch_size=8, **sizes)
        model = kind(encoder=coder, masking_ratio=0.75, decoder_dim=32, decoder_depth=1)
    elif name == "CaiT":
        model = kind(patch_size=8, cls_depth=1, layer_dropout=0.05, **sizes)
    elif name == "CvT":
        model = kind(num_classes=5, s1_emb_dim=8, s2_emb_dim=16, s3_emb_dim=16, s3_depth=1)
    else:
        model = kind(patch_size=8, **sizes)
    return model.train(), random_of(2, 3, 32, 32)


def open_clip_model() -> Built:
    """Return a model of open_clip."""
    import open_clip

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": WORDS, "width": 32, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = seeded(step)
        words = torch.randint(WORDS, (2, 16), generator=generator)
        return (torch.randn(2, 3, 32, 32, generator=generator), words), {}

    return model.train(), batch


def diffusion() -> Built:
    """Return a diffusion that draws times and noise itself."""
    import denoising_diffusion_pytorch as ddpm

    net = ddpm.Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    model = ddpm.GaussianDiffusion(net, image_size=16, timesteps=50)
    return model.train(), lambda step: ((torch.rand(2, 3, 16, 16, generator=seeded(step)),), {})
