"""MLP-Mixer: perceptrons applied in turn across patches and across channels."""

from __future__ import annotations

from torch import Tensor, nn


def perceptron(width: int, hidden: int, dropout: float) -> nn.Sequential:
    """Return two linear layers with a GELU between them."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, width),
        nn.Dropout(dropout),
    )


class MixerBlock(nn.Module):
    """One perceptron over the patches, one over the channels, each around a residual."""

    def __init__(self, patches: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.across_patches = perceptron(patches, dim // 2, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.across_channels = perceptron(dim, 4 * dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across_channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Images (batch, channels, image_size, image_size) to logits (batch, num_classes)."""

    def __init__(
        self,
        *,
        image_size: int = 256,
        patch_size: int = 16,
        channels: int = 3,
        dim: int = 512,
        depth: int = 12,
        num_classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size {image_size} is not a multiple of {patch_size}")
        self.embed = nn.Conv2d(channels, dim, patch_size, patch_size)
        patches = (image_size // patch_size) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(patches, dim, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))
