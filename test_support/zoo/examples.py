"""Small modules, each with a trap for whoever records it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Convolutional(nn.Module):
    """BatchNorm, in-place ReLU, an in-place sum with a later branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.side = nn.Conv2d(3, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.side(x)
        return torch.relu_(y).mean((2, 3))


class Residual(nn.Module):
    """Equal residual layers with dropout and split views."""

    def __init__(self, layers: int = 3, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            a, b, c = up(x).chunk(3, dim=-1)
            x = x + self.dropout(down(torch.tanh(a) * b.sigmoid() + c))
        return x


class Overlapping(nn.Module):
    """A value used by several operations and by views of itself: gradient order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        a, b = z * 1.37, z.sin()
        flat, part = z.view(-1) * 0.77, z[:, :5] * 3.3
        return a.sum() + b.pow(2).sum() + flat.cumsum(0).sum() + part.exp().sum() + (z * z).sum()


class Mixed(nn.Module):
    """A no-grad region, a written slice, padding, a transposed weight, nested outputs."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            offset = (self.mask * 2).cumsum(0)
        y = self.linear(x) + offset
        z = torch.dropout(torch.relu_(self.bn(y)), 0.3, True)
        z = z @ self.matrix.t() @ self.matrix
        out = torch.zeros_like(z)
        out[:, 1:3] = z[:, 1:3]
        p, q = z.chunk(2, 1)
        return {"sum": (out + torch.nn.functional.pad(p * q, (0, 4))).sum(), "rest": (z, None)}


class Recurrent(nn.Module):
    """An LSTM: several results of one operation, and a kernel chosen by the grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(x)
        return out.sum() + hidden.square().sum() + cell.mean()


class Spectral(nn.Module):
    """Complex values between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 9, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight).relu()


class LowPrecision(nn.Module):
    """An autocast region inside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
        return self.second(y.float())


class Turned(nn.Module):
    """A value used as it is and transposed: how its gradient's sum lies in memory matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 37)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.scale.exp() * self.linear(x)
        return logits.softmax(1).square().sum() + logits.T.log_softmax(1).square().sum()


class Averaging(nn.Module):
    """A buffer that the forward reads and writes."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y * self.average


def example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a small module in train mode and the arguments of its sample."""
    torch.manual_seed(0)
    examples: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
        "convolutional": (Convolutional, (torch.randn(2, 3, 8, 8),)),
        "residual": (Residual, (torch.randn(4, 16),)),
        "overlapping": (Overlapping, (torch.randn(4, 8),)),
        "mixed": (Mixed, (torch.randn(4, 8),)),
        "recurrent": (Recurrent, (torch.randn(5, 3, 6),)),
        "spectral": (Spectral, (torch.randn(4, 16),)),
        "low_precision": (LowPrecision, (torch.randn(4, 8),)),
        "averaging": (Averaging, (torch.randn(4, 8),)),
        "turned": (Turned, (torch.randn(29, 8),)),
    }
    build, sample = examples[name]
    return build().train(), sample


EXAMPLES = (
    "convolutional",
    "residual",
    "overlapping",
    "mixed",
    "recurrent",
    "spectral",
    "low_precision",
    "averaging",
    "turned",
)
