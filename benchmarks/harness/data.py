"""Training data that is on every machine with Python: the standard library's own sources."""

from __future__ import annotations

import marshal
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

FILES = 80  # of the standard library, the first ones by name: about two megabytes of source


def sources() -> list[bytes]:
    """Return the source text of modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file.read_bytes() for file in files[:FILES]]


def text_batches(count: int, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` pairs (bytes, the bytes that follow each), drawn at fixed random places."""
    corpus = torch.frombuffer(bytearray(b"".join(sources())), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        starts = torch.randint(len(corpus) - length - 1, (batch, 1), generator=generator)
        places = starts + torch.arange(length)
        batches.append((corpus[places], corpus[places + 1]))
    return batches


def image_batches(count: int, batch: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` pairs (images, labels); an image is a piece of a file, a byte a pixel.

    The three classes are Python source, its bytecode, and the same bytecode compressed. Three
    neighbouring pieces make the three channels.
    """
    texts = sources()
    bytecode = [marshal.dumps(compile(text, "module", "exec")) for text in texts]
    kinds = [texts, bytecode, [zlib.compress(code) for code in bytecode]]
    files = [torch.frombuffer(bytearray(b"".join(kind)), dtype=torch.uint8) for kind in kinds]
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        labels = torch.randint(len(files), (batch,), generator=generator)
        pieces = []
        for label in labels.tolist():
            room = len(files[label]) - 3 * size * size
            start = int(torch.randint(room, (1,), generator=generator))
            pieces.append(files[label][start : start + 3 * size * size].view(3, size, size))
        batches.append((torch.stack(pieces).float() / 127.5 - 1, labels))
    return batches
