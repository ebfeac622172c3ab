"""A dataset of texts, as trainers take it."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nets import tokens


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences and labels; where batches do not divide the count, the last one is smaller."""

    def __init__(self, count: int, length: int) -> None:
        self.ids, _ = tokens(count, length, 90)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}
