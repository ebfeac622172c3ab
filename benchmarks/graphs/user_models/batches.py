"""Batches as users make them: padded differently at each step, with labels, pictures, sounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
Built = tuple[nn.Module, Batch]
WORDS = 100


@dataclass(frozen=True, slots=True)
class UserModel:
    """One model of one package, and how to build it and its batches."""

    package: str
    name: str
    build: Callable[[], Built]


def seeded(step: int) -> torch.Generator:
    """Return the generator of a step."""
    return torch.Generator().manual_seed(100 + step)


def tokens(step: int, length: int = 16) -> dict[str, Tensor]:
    """Return ids and a mask: rows padded differently at each step, and at the third not at all."""
    generator = seeded(step)
    ids = torch.randint(3, WORDS, (4, length), generator=generator)
    mask = torch.ones_like(ids)
    if step != 2:
        kept = torch.randint(length // 2, length, (4, 1), generator=generator)
        kept[0] = length  # the longest row of a batch is not padded
        mask = (torch.arange(length) < kept).long()
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def classes(step: int) -> dict[str, Any]:
    """Return tokens, and a class for each row."""
    return {**tokens(step), "labels": torch.randint(2, (4,), generator=seeded(step))}


def causal(step: int) -> dict[str, Any]:
    """Return tokens, and themselves as labels where nothing is padded."""
    made = tokens(step)
    return {**made, "labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}


def marked(step: int) -> dict[str, Any]:
    """Return tokens, and a class for each of them."""
    labels = torch.randint(2, (4, 16), generator=seeded(step))
    return {**tokens(step), "labels": labels}


def pair(step: int) -> dict[str, Any]:
    """Return tokens, and those to make of them; some rows are shorter."""
    labels = torch.randint(3, WORDS, (4, 10), generator=seeded(step))
    if step != 2:
        labels[1:, 7:] = -100
    return {**tokens(step), "labels": labels}


def answers(step: int) -> dict[str, Any]:
    """Return tokens, and where an answer begins and ends."""
    start, end = torch.randint(8, (2, 4), generator=seeded(step))
    return {**tokens(step), "start_positions": start, "end_positions": end}


def pictures(step: int, size: int = 32) -> dict[str, Any]:
    """Return small pictures and their classes."""
    generator = seeded(step)
    pixels = torch.randn(2, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(2, (2,), generator=generator)}


def drawn(step: int, size: int = 32) -> dict[str, Any]:
    """Return small pictures and a class for each pixel."""
    generator = seeded(step)
    labels = torch.randint(2, (2, size, size), generator=generator)
    return {**pictures(step, size), "labels": labels}


def sounds(step: int) -> dict[str, Any]:
    """Return sounds of two lengths and their classes."""
    generator = seeded(step)
    mask = torch.ones(2, 2000, dtype=torch.long)
    if step != 2:
        mask[1, 1500 + 100 * step :] = 0
    sound = torch.randn(2, 2000, generator=generator) * mask
    labels = torch.randint(2, (2,), generator=generator)
    return {"input_values": sound, "attention_mask": mask, "labels": labels}


def spoken(step: int) -> dict[str, Any]:
    """Return sounds, and what is said in them."""
    labels = torch.randint(3, 32, (2, 6), generator=seeded(step))
    labels[1, 4:] = -100
    return {**sounds(step), "labels": labels}


def keywords(make: Callable[[int], dict[str, Any]]) -> Batch:
    """Return batches that are keyword arguments."""
    return lambda step: ((), make(step))


def random_of(*shape: int) -> Batch:
    """Return batches of one tensor of random numbers."""
    return lambda step: ((torch.randn(shape, generator=seeded(step)),), {})


def integers_of(high: int, *shape: int) -> Batch:
    """Return batches of one tensor of integers below `high`."""
    return lambda step: ((torch.randint(high, shape, generator=seeded(step)),), {})
