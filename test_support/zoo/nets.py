"""Small networks that exercise what makes recomputation hard.

Each network returns its loss, so that everything it holds is inside the budget.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from zoo.operators import TinyFNO, TinyUNO


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class TinyGPT(nn.Module):
    """GPT-2: dropout, causal attention, the head tied to the embedding."""

    def __init__(
        self, layers: int = 3, width: int = 64, vocab: int = 120, length: int = 32, p: float = 0.1
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(width, 4, p) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(
            nn.Conv2d(inner, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.down(x)
        return self.relu(out)


class TinyResNet(nn.Module):
    """ResNet: BatchNorm, in-place ReLU, `out += identity`."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        inner = width
        stages = []
        for index in range(blocks):
            stages.append(Bottleneck(inner, width << index, 1 + (index > 0)))
            inner = 4 * (width << index)
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inner, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(self.stages(self.stem(images)).mean((2, 3))), labels)


class TinyUNet(nn.Module):
    """U-Net: skip connections that make one block of the whole network."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()

        def double(inner: int, outer: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inner, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
            )

        widths = [width << level for level in range(depth)]
        self.down = nn.ModuleList(
            double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            double(widths[level] + widths[level + 1], widths[level])
            for level in reversed(range(depth - 1))
        )
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        skips = []
        x = images
        for level, block in enumerate(self.down):
            x = block(x)
            if level < len(self.down) - 1:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return F.cross_entropy(self.out(x), labels)


class TinyTransformer(nn.Module):
    """nn.Transformer: an encoder whose output feeds every decoder layer."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.net = nn.Transformer(width, 4, layers, layers, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.net(source, target).square().mean()


class TinyMixer(nn.Module):
    """MLP-Mixer: transposed token mixing."""

    def __init__(self, tokens: int = 16, width: int = 32, layers: int = 3) -> None:
        super().__init__()

        def mlp(size: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(size, 2 * size), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * size, size)
            )

        self.tokens = nn.ModuleList(mlp(tokens) for _ in range(layers))
        self.channels = nn.ModuleList(mlp(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * layer](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * layer + 1](x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class TinyLSTM(nn.Module):
    """LSTM language model: several outputs of one operation, kernels chosen by the grad mode."""

    def __init__(self, vocab: int = 80, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(self.embed(ids))
        logits = self.head(self.norm(out) + hidden[-1].unsqueeze(1))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TiedMLP(nn.Module):
    """One weight used three times, transposed once, and one submodule called twice."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = torch.tanh(self.second(y))
        y = torch.sigmoid(self.first(y) + x)
        return (y @ self.first.weight.t()).square().mean()


def tokens(batch: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (batch, length + 1), generator=source)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(batch: int, size: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, size, size, generator=source)
    return pixels, torch.randint(0, 10, (batch,), generator=source)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def network(name: str) -> tuple[nn.Module, Any]:
    """Return a freshly initialised network in train mode, and a sample for it."""
    torch.manual_seed(0)
    pixels, labels = images(4, 16)
    fields = (_noise(4, 1, 16, 16), _noise(4, 1, 16, 16).cos())
    builders: dict[str, tuple[Any, Any]] = {
        "gpt": (TinyGPT, tokens(4, 32, 120)),
        "resnet": (TinyResNet, (pixels, labels)),
        "unet": (TinyUNet, (pixels, labels[:, None, None].expand(-1, 16, 16).contiguous() % 4)),
        "transformer": (TinyTransformer, (_noise(3, 12, 32), _noise(3, 10, 32))),
        "mixer": (TinyMixer, (pixels, labels)),
        "lstm": (TinyLSTM, tokens(4, 12, 80)),
        "tied": (TiedMLP, (_noise(16, 48),)),
        "fno": (TinyFNO, fields),
        "uno": (TinyUNO, fields),
    }
    build, sample = builders[name]
    model: nn.Module = build()
    return model.train(), sample


def network_on(device: torch.device, name: str) -> tuple[nn.Module, Any]:
    """Return a network and its sample on a device."""
    model, sample = network(name)
    return model.to(device), tuple(tensor.to(device) for tensor in sample)


def hugging_face_gpt2(
    *, layers: int = 2, width: int = 32, vocab: int = 90, length: int = 32
) -> nn.Module:
    """Return a GPT-2 of the library, which must be installed, in train mode."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_head=2, n_embd=width, vocab_size=vocab, n_positions=length,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()
