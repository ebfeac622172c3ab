"""Fourier neural operator in one dimension: layers that multiply the lowest frequencies.

Li et al.: *Fourier Neural Operator for Parametric Partial Differential Equations*, ICLR 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)


class SpectralConv(nn.Module):
    """Mix the channels of each of the lowest `modes` frequencies, and drop all higher ones."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", spectrum, self.weight)
        return torch.fft.irfft(mixed, n=x.shape[-1])


class FourierBlock(nn.Module):
    """A spectral and a pointwise convolution, added."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.spectral = SpectralConv(width, modes)
        self.pointwise = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.spectral(x) + self.pointwise(x))


class FNO1d(nn.Module):
    """Functions sampled at (batch, length, 1) to functions of the same shape."""

    def __init__(self, *, modes: int = 16, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1)
        self.blocks = nn.Sequential(*(FourierBlock(width, modes) for _ in range(depth)))
        self.project = nn.Sequential(nn.Conv1d(width, 128, 1), nn.GELU(), nn.Conv1d(128, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x.transpose(1, 2))
        return self.project(self.blocks(x)).transpose(1, 2)
