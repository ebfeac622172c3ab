"""Random chains for rotor, and sequential networks with every trap in them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from torch import nn

from rotor.schedules.chain import Chain, Option, Stage

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def random_chain(
    generator: random.Random, stages: int, *, options: int = 2, largest: int = 6
) -> Chain:
    """Return a chain of tiny integers: sizes up to `largest`, times up to 9."""

    def size() -> int:
        return generator.randint(0, largest)

    made = []
    for index in range(stages):
        output = generator.randint(1, largest)
        ways = tuple(
            Option(
                saved_bytes=output + size(),
                fwd_time_ms=float(generator.randint(1, 9)),
                bwd_time_ms=float(generator.randint(1, 9)),
                fwd_overhead_bytes=generator.randint(0, 3),
                bwd_overhead_bytes=size(),
            )
            for _ in range(generator.randint(1, options))
        )
        made.append(
            Stage(
                name=f"stage{index}",
                options=ways,
                output_bytes=output,
                output_grad_bytes=size(),
                forward_time_ms=float(generator.randint(1, 9)),
                forward_peak_bytes=output + generator.randint(0, 3),
            )
        )
    return Chain(tuple(made))


def chains(max_stages: int = 5, *, options: int = 2, largest: int = 6) -> SearchStrategy[Chain]:
    """Return a hypothesis strategy of `random_chain`s, shrinking to few stages."""
    from hypothesis import strategies as st

    return st.builds(
        lambda seed, stages: random_chain(
            random.Random(seed), stages, options=options, largest=largest
        ),
        st.integers(0, 2**32 - 1),
        st.integers(1, max_stages),
    )


class ResidualBlock(nn.Module):
    """Convolution, BatchNorm, in-place ReLU and dropout, added to the input."""

    def __init__(self, channels: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape."""
        added: torch.Tensor = x + self.drop(self.relu(self.norm(self.conv(x))))
        return added


class Squashed(nn.Module):
    """A linear layer, which may be another's, and tanh."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape."""
        return torch.tanh(self.linear(x))


def residual_net(blocks: int = 6, channels: int = 8, dropout: float = 0.2) -> nn.Sequential:
    """Return a nested sequential classifier of 3-channel images, with every trap in it."""
    body = nn.Sequential(*(ResidualBlock(channels, dropout) for _ in range(blocks)))
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        body,
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 10),
    )


def in_place_net(blocks: int = 4, channels: int = 8) -> nn.Sequential:
    """Return a flat classifier of 3-channel images as commonly written: what can is in place."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(inplace=True)]
    for block in range(blocks):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)]
        if block % 2:
            layers += [nn.Hardswish(inplace=True), nn.Dropout(0.1, inplace=True)]
        else:
            layers += [nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)]
    return nn.Sequential(*layers, nn.Dropout(0.1, inplace=True))


def mlp(depth: int = 8, width: int = 32, dropout: float = 0.1) -> nn.Sequential:
    """Return a plain deep network with dropout."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


def images(count: int = 3, batch: int = 4) -> list[torch.Tensor]:
    """Return inputs of `residual_net`, one for each training step."""
    return [torch.randn(batch, 3, 12, 12) for _ in range(count)]
