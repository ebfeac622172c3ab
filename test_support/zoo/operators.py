"""Neural operators as small networks: complex weights, Fourier transforms, writes into slices.

Each returns its loss, like the networks of nets.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn


class SpectralConv(nn.Module):
    """Mix the channels of the lowest frequencies, written into a spectrum of zeros.

    The inverse transform may have another size: that is how a U-shaped operator changes resolution.
    """

    def __init__(self, inner: int, outer: int, modes: int) -> None:
        super().__init__()
        self.outer, self.modes = outer, modes
        weight = torch.randn(2, inner, outer, modes, modes, dtype=torch.cfloat) / inner
        self.low, self.high = (nn.Parameter(part.clone()) for part in weight)

    def forward(self, x: Tensor, size: int) -> Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        mixed = spectrum.new_zeros(x.shape[0], self.outer, size, size // 2 + 1)
        mixed[:, :, :m, :m] = torch.einsum("bihw,iohw->bohw", spectrum[:, :, :m, :m], self.low)
        # the rows' negative frequencies are at their end
        mixed[:, :, -m:, :m] = torch.einsum("bihw,iohw->bohw", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(mixed, s=(size, size))


class OperatorBlock(nn.Module):
    """A spectral and a pointwise convolution, both brought to the new size and added."""

    def __init__(self, inner: int, outer: int, modes: int) -> None:
        super().__init__()
        self.spectral = SpectralConv(inner, outer, modes)
        self.pointwise = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, size: int) -> Tensor:
        y = self.pointwise(x)
        if size != x.shape[-1]:
            y = F.interpolate(y, size=(size, size), mode="bilinear")
        return F.gelu(self.spectral(x, size) + y)


class _Operator(nn.Module):
    """What both operators share: grid coordinates, lifting, projection and a relative error."""

    def __init__(self, width: int, last: int) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.project = nn.Sequential(
            nn.Conv2d(last, 2 * last, 1), nn.GELU(), nn.Conv2d(2 * last, 1, 1)
        )

    def lifted(self, field: Tensor) -> Tensor:
        batch, _, size, _ = field.shape
        line = torch.linspace(0, 1, size, device=field.device, dtype=field.dtype)
        rows = line.view(1, 1, -1, 1).expand(batch, 1, size, size)
        columns = line.view(1, 1, 1, -1).expand(batch, 1, size, size)
        return self.lift(torch.cat([field, rows, columns], 1))

    def error(self, x: Tensor, target: Tensor) -> Tensor:
        difference = (self.project(x) - target).flatten(1).norm(dim=1)
        return (difference / target.flatten(1).norm(dim=1)).mean()


class TinyFNO(_Operator):
    """Fourier neural operator: a chain of blocks at one resolution.

    Li et al.: *Fourier Neural Operator for Parametric Partial Differential Equations*, ICLR 2021.
    """

    def __init__(self, width: int = 8, modes: int = 4, layers: int = 4) -> None:
        super().__init__(width, width)
        self.blocks = nn.ModuleList(OperatorBlock(width, width, modes) for _ in range(layers))

    def forward(self, field: Tensor, target: Tensor) -> Tensor:
        x = self.lifted(field)
        for block in self.blocks:
            x = block(x, field.shape[-1])
        return self.error(x, target)


class TinyUNO(_Operator):
    """U-shaped neural operator: blocks that change resolution, and skips over all of them.

    Rahman, Ross, Azizzadenesheli: *U-NO: U-shaped Neural Operators*, TMLR 2023.
    """

    def __init__(self, width: int = 8, modes: int = 2, depth: int = 3) -> None:
        super().__init__(width, 2 * width)
        widths = [width << level for level in range(depth)]
        self.down = nn.ModuleList(
            OperatorBlock(widths[level], widths[level + 1], modes) for level in range(depth - 1)
        )
        self.middle = OperatorBlock(widths[-1], widths[-1], modes)
        self.up = nn.ModuleList(
            # below the top each level was made twice as wide by the skip joined to it
            OperatorBlock(widths[level + 1] * (1 + (level < depth - 2)), widths[level], modes)
            for level in reversed(range(depth - 1))
        )

    def forward(self, field: Tensor, target: Tensor) -> Tensor:
        x = self.lifted(field)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(x, x.shape[-1] // 2)
        x = self.middle(x, x.shape[-1])
        for block in self.up:
            x = torch.cat([block(x, 2 * x.shape[-1]), skips.pop()], 1)
        return self.error(x, target)
