"""Training loops whose batches have many sizes, as their users write them.

Texts are padded to the longest of their batch by transformers' own collator; images come in sizes
that a U-Net takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.missing_operators import declare_missing_operators
from models.unet import UNet

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loop:
    """A network, the batches that it is trained on, and the loss of one."""

    title: str
    model: nn.Module
    batches: Sequence[Batch]
    sample: Batch  # of a middle size: what is planned first
    loss: Callable[[nn.Module, Batch], Tensor]
    budget: float

    @staticmethod
    def shape(batch: Batch) -> str:
        """Return what differs between batches: a length, or height and width."""
        first = next(iter(batch.values()))
        return "x".join(map(str, first.shape[-1:] if first.dim() == 2 else first.shape[-2:]))


@dataclass(frozen=True)
class Scale:
    """How large a loop is; `smoke` only shows that it runs."""

    layers: int
    width: int
    texts: int
    lengths: Sequence[int]
    steps: int
    words: int = 1000
    budget: float = 0.6  # of plain PyTorch's peak at a middle size


TEXT = Scale(layers=12, width=384, texts=8, lengths=range(24, 152, 2), steps=400)
SMOKE = Scale(layers=2, width=32, texts=4, lengths=(6, 9, 12), steps=6, words=40)
IMAGES = Scale(layers=4, width=16, texts=4, lengths=range(96, 192, 16), steps=400, budget=0.9)
SMALL_IMAGES = Scale(layers=2, width=4, texts=2, lengths=(16, 32), steps=6)


def bert(scale: Scale) -> Loop:
    """Return a BERT that classifies texts."""
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=scale.words,
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=4,
        intermediate_size=4 * scale.width,
    )
    model = transformers.BertForSequenceClassification(config)
    batches = _texts(scale, classes=2)
    return Loop("BERT", model.train(), batches, _middle(batches), _its_own_loss, scale.budget)


def llama(scale: Scale) -> Loop:
    """Return a Llama that learns to go on with texts."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=scale.words,
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=3 * scale.width,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    batches = _texts(scale, classes=None)
    return Loop("Llama", model.train(), batches, _middle(batches), _its_own_loss, scale.budget)


def unet(scale: Scale) -> Loop:
    """Return a U-Net on images of all heights and widths of the scale."""
    model = UNet(width=scale.width, depth=scale.layers)
    sides = [(h, w) for h in scale.lengths for w in scale.lengths if w >= h]
    sides = sides[: scale.steps]
    draw = random.Random(0)
    order = [*sides, *draw.choices(sides, k=scale.steps - len(sides))]
    draw.shuffle(order)
    batches = [{"x": torch.randn(scale.texts, 3, h, w)} for h, w in order]
    return Loop("U-Net", model.train(), batches, _middle(batches), _mean_square, scale.budget)


LOOPS: Mapping[str, tuple[Callable[[Scale], Loop], Scale, Scale]] = {
    "bert": (bert, TEXT, SMOKE),
    "llama": (llama, TEXT, SMOKE),
    "unet": (unet, IMAGES, SMALL_IMAGES),
}


def _transformers() -> Any:
    declare_missing_operators()
    import transformers

    return transformers


def _texts(scale: Scale, classes: int | None) -> list[Batch]:
    """Return batches of random texts; the longest of each has one of the scale's lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ("[PAD]", "[UNK]", *(f"word{i}" for i in range(2, scale.words)))
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers = _transformers()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    collate = transformers.DataCollatorWithPadding(tokenizer)
    draw = random.Random(0)
    every = [*scale.lengths][: scale.steps]
    longest = [*every, *draw.choices(scale.lengths, k=scale.steps - len(every))]
    draw.shuffle(longest)
    batches = []
    for length in longest:
        counts = [length, *(draw.randint(length // 2, length) for _ in range(scale.texts - 1))]
        texts = [" ".join(draw.choices(names[2:], k=count)) for count in counts]
        rows = [tokenizer(text, return_token_type_ids=False) for text in texts]
        if classes is not None:
            rows = [{**row, "labels": draw.randrange(classes)} for row in rows]
        batch = dict(collate(rows))
        if classes is None:
            padded = batch["attention_mask"] == 0
            batch["labels"] = batch["input_ids"].masked_fill(padded, -100)
        batches.append(batch)
    return batches


def _middle(batches: Sequence[Batch]) -> Batch:
    ordered = sorted(batches, key=lambda batch: next(iter(batch.values())).numel())
    return ordered[len(ordered) // 2]


def _its_own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _mean_square(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(**batch)
    return result.square().mean()
