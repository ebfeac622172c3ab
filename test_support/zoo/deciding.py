"""Networks whose roots decide by values which of their blocks they call."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

WIDTH, ROWS = 32, 64


class Layer(nn.Module):
    def __init_subclass__(cls) -> None:
        assert callable(cls.forward)  # libraries look at it while a class is made

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Depth(nn.Module):
    """Layers are left out by Python's random numbers, as in stochastic depth and layerdrop."""

    def __init__(self, layers: int = 5, layerdrop: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() >= self.layerdrop:
                x = x + layer(x)
        return x.square().mean()


class Experts(nn.Module):
    """One expert for each row, found by a mask: its size is a value."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return (x + y).square().mean()


class Exit(nn.Module):
    """It leaves once its values are large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.calls = 0  # what Python counts, and no plan takes for granted

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x)
            if float(x.detach().abs().max()) > 60:
                break
        return x.square().mean()


class Forcing(nn.Module):
    """Teacher forcing: one cell, called for every token."""

    def __init__(self, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(vocabulary, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.zeros(len(tokens), WIDTH)
        token, loss = tokens[:, 0], torch.zeros(())
        for target in tokens[:, 1:].unbind(1):
            hidden = self.cell(self.embed(token), hidden)
            logits = self.out(hidden)
            loss = loss + F.cross_entropy(logits, target)
            token = target if random.random() < 0.5 else logits.argmax(-1)
        return loss


class Encoder(nn.Module):
    """What decides lies inside, in the largest part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Depth()
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.tanh(self.before(x)))[None])


class Nested(nn.Module):
    """The root decides, and what decides inside lies two modules deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x if random.random() < 0.5 else -x)


class Checked(nn.Module):
    """Layers that look at their own values, and are no chain of modules inside."""

    class Layer(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.up(x)).sin().cos() * torch.rand(())
            self.seen += 1
            if y.abs().max() > 1e3:
                y = y.clamp(-1e3, 1e3)
            return self.down(y)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.9:
                x = x + layer(x)
        return x.square().mean()


class Residual(nn.Module):
    """BatchNorm counts and in-place sums in layers that come or not."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(1, 4, 3, 1, 1), nn.BatchNorm1d(4)
            self.back = nn.Conv1d(4, 1, 3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.back(F.relu(self.norm(self.conv(x)), inplace=True)).add_(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        for layer in self.layers:
            if float(torch.rand(())) < 0.8:
                x = layer(x)
        return x.square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> Tensor:
    return torch.randint(0, 20, (16, 9), generator=torch.Generator().manual_seed(step))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "depth": (Depth, rows),
    "experts": (Experts, rows),
    "exit": (Exit, lambda step: rows(step) * (1 + 4 * (step % 3))),
    "forcing": (Forcing, tokens),
    "encoder": (Encoder, rows),
    "nested": (Nested, rows),
    "checked": (Checked, rows),
    "residual": (Residual, rows),
}


class Repeated(nn.Module):
    """One layer, as often as a value says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.times = 3

    def forward(self, x: Tensor) -> Tensor:
        times = self.times if random.random() < 2 else 0
        for _ in range(times):
            x = x + self.layer(x)
        return x.square().mean()


class Scaling(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.copies = 1.0, 1
        self.shift = torch.zeros(1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        many = super().forward(x.repeat(self.copies, 1)) * scale * self.gain + self.shift
        return many[: len(x)]


class Scaled(nn.Module):
    """Decides by a value, and hands a number on to its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling() for _ in range(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            if x.mean() < 100:
                x = x + layer(x, scale)
        return x.square().mean()
