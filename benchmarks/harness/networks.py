"""The networks of the experiments, each at three sizes, with what the strategies need to know.

"smoke" runs in moments, "cpu" keeps the published depths and shrinks widths and images so that a
step takes a fraction of a second on two cores, "paper" is what the papers trained on a GPU. The
loss is inside, so that peaks and budgets cover the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from harness.missing_operators import declare_missing_operators
from models.fno import FNO1d
from models.GPT import GPT2WithLoss
from models.loss import WithLabels, WithLoss
from models.mlp_mixer import MLPMixer
from models.peers_gpt import GPT
from models.regnet import RegNet, regnet_x_3_2gf, regnet_x_200mf, regnet_y_1_6gf
from models.resnet import ResNet, resnet18, resnet50, resnet101, resnet152
from models.unet import UNet

SIZES = ("smoke", "cpu", "paper")


@dataclass(frozen=True)
class Case:
    """A network with its loss inside, one batch, and how it is made of parts.

    `blocks` are what people put a checkpoint around. `stages` returns the modules of an equivalent
    `nn.Sequential`, sharing the parameters, whose input is the first tensor of the sample; None
    where the network is no chain.
    """

    model: nn.Module
    sample: tuple[Tensor, ...]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    stages: Callable[[nn.Module, Sequence[Tensor]], Sequence[nn.Module]] | None


@dataclass(frozen=True)
class Network:
    """How to make one network at every size, for a batch of any size."""

    title: str
    sizes: Mapping[str, Mapping[str, Any]]  # arguments of `make`, and "batch"
    make: Callable[..., Case]

    def case(self, size: str, batch: int = 0, seed: int = 0, **other: Any) -> Case:
        """Return the network and a batch; `batch=0` is the size's own."""
        settings = {**self.sizes[size], **other}
        usual = settings.pop("batch")
        torch.manual_seed(seed)
        return self.make(batch=batch or usual, **settings)


class Last(nn.Module):
    """The end of a chain: some modules in order, then the loss against fixed targets."""

    targets: Tensor

    def __init__(
        self, modules: Sequence[nn.Module], loss: Callable[[Tensor, Tensor], Tensor], y: Tensor
    ) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.loss = loss
        self.register_buffer("targets", y, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return self.loss(x, self.targets)


class Embed(nn.Module):
    """Tokens and positions to vectors, with dropout where the network has it."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, idx: Tensor) -> Tensor:
        places = torch.arange(idx.shape[1], device=idx.device)
        return self.dropout(self.tokens(idx) + self.positions(places))


def one_stage(*modules: nn.Module) -> nn.Sequential:
    """Return modules that stay together, as an in-place ReLU must with what is before it."""
    joined = nn.Sequential(*modules)
    joined.not_really_sequential = True
    return joined


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(batch: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and the ones that follow each."""
    text = torch.randint(vocab, (batch, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def gpt2(batch: int, layers: int, width: int, heads: int, vocab: int, length: int) -> Case:
    """GPT-2, dropout 0.1, tied embedding."""
    model = GPT2WithLoss(
        layers, 0.1, d_model=width, n_heads=heads, vocab=vocab, max_length=max(length, 2)
    )

    def stages(model: nn.Module, sample: Sequence[Tensor]) -> Sequence[nn.Module]:
        assert isinstance(model, GPT2WithLoss)
        first = Embed(model.tokens, model.positions, model.dropout)
        return [first, *model.blocks, Last([model.norm, model.head], token_loss, sample[1])]

    return Case(model, tokens(batch, length, vocab), lambda m: list(m.blocks), stages)


def peers_gpt(batch: int, layers: int, width: int, length: int) -> Case:
    """The GPT of the table of peers: vocabulary 1024, no dropout, nothing tied."""
    model = GPT(layers, width, length)
    ids = torch.randint(0, 1024, (batch, length))

    def stages(model: nn.Module, sample: Sequence[Tensor]) -> Sequence[nn.Module]:
        assert isinstance(model, GPT)
        first = Embed(model.tokens, model.positions, nn.Identity())
        return [first, *model.blocks, Last([model.norm, model.head], token_loss, sample[1])]

    return Case(model, (ids, ids), lambda m: list(m.blocks), stages)


def llama(batch: int, layers: int, width: int, vocab: int, length: int) -> Case:
    """The Llama of transformers with its own loss, heads of 64 and grouped keys."""
    declare_missing_operators()
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // 64)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=max(length, 2),
    )
    ids = torch.randint(0, vocab, (batch, length))

    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        return list(model.model.model.layers)

    return Case(WithLabels(LlamaForCausalLM(config)), (ids, ids), blocks, None)


def images(batch: int, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    return torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,))


def resnet(batch: int, make: Callable[..., ResNet], width: int, pixels: int) -> Case:
    """A ResNet with BatchNorm and in-place ReLU."""

    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        net = model.model
        return [*net.layer1, *net.layer2, *net.layer3, *net.layer4]

    def stages(model: nn.Module, sample: Sequence[Tensor]) -> Sequence[nn.Module]:
        net = model.model
        first = [net.conv1, one_stage(net.bn1, net.relu), net.maxpool]
        head = [net.avgpool, nn.Flatten(), net.fc]
        return [*first, *blocks(model), Last(head, F.cross_entropy, sample[1])]

    classes = 1000 if width == 64 else 10
    model = WithLoss(make(width=width, num_classes=classes))
    return Case(model, images(batch, pixels, classes), blocks, stages)


def regnet(batch: int, make: Callable[..., RegNet], pixels: int) -> Case:
    """A RegNet, X or Y."""

    def stages(model: nn.Module, sample: Sequence[Tensor]) -> Sequence[nn.Module]:
        net = model.model
        last = Last([net.pool, nn.Flatten(), net.fc], F.cross_entropy, sample[1])
        return [one_stage(*net.stem), *net.blocks, last]

    model = WithLoss(make(num_classes=1000))
    return Case(model, images(batch, pixels, 1000), lambda m: list(m.model.blocks), stages)


class MixerStart(nn.Module):
    """The patches of an image, embedded."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean over patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def mixer(batch: int, pixels: int, patch: int, dim: int, depth: int) -> Case:
    """MLP-Mixer."""
    model = WithLoss(
        MLPMixer(image_size=pixels, patch_size=patch, dim=dim, depth=depth, num_classes=1000)
    )

    def stages(model: nn.Module, sample: Sequence[Tensor]) -> Sequence[nn.Module]:
        net = model.model
        last = Last([net.norm, Mean(), net.head], F.cross_entropy, sample[1])
        return [MixerStart(net.embed), *net.blocks, last]

    return Case(model, images(batch, pixels, 1000), lambda m: list(m.model.blocks), stages)


def transformer(batch: int, layers: int, width: int, heads: int, length: int) -> Case:
    """PyTorch's own `nn.Transformer`: every decoder layer reads the encoder's end, so no chain."""
    net = nn.Transformer(width, heads, layers, layers, 4 * width, batch_first=True)
    sample = tuple(torch.randn(batch, length, width) for _ in range(3))

    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        return [*model.model.encoder.layers, *model.model.decoder.layers]

    return Case(WithLoss(net, F.mse_loss), sample, blocks, None)


def unet(batch: int, width: int, depth: int, pixels: int) -> Case:
    """A U-Net: skip connections at every resolution, so no chain."""
    sample = (torch.randn(batch, 3, pixels, pixels), torch.randint(2, (batch, pixels, pixels)))

    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        return [model.model.first, *model.model.down, *model.model.merge]

    return Case(WithLoss(UNet(width=width, depth=depth)), sample, blocks, None)


class Swap(nn.Module):
    """The two last axes exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def fno(batch: int, modes: int, width: int, depth: int, length: int) -> Case:
    """A Fourier neural operator in one dimension."""
    model = WithLoss(FNO1d(modes=modes, width=width, depth=depth), F.mse_loss)
    sample = (torch.randn(batch, length, 1), torch.randn(batch, length, 1))

    def stages(model: nn.Module, sample: Sequence[Tensor]) -> Sequence[nn.Module]:
        net = model.model
        last = Last([*net.project, Swap()], F.mse_loss, sample[1])
        return [one_stage(Swap(), net.lift), *net.blocks, last]

    return Case(model, sample, lambda m: list(m.model.blocks), stages)


def _gpt2(
    title: str, layers: int, width: int, heads: int, batch: int, length: int, cpu_width: int
) -> Network:
    return Network(
        title,
        {
            "smoke": _of(batch=4, layers=1, width=32, heads=2, vocab=64, length=32),
            "cpu": _of(
                batch=4,
                layers=layers,
                width=cpu_width,
                heads=4,
                vocab=512,
                length=cpu_width * 2 // 3,
            ),
            "paper": _of(
                batch=batch, layers=layers, width=width, heads=heads, vocab=50257, length=length
            ),
        },
        gpt2,
    )


def _resnet(title: str, make: Callable[..., ResNet]) -> Network:
    return Network(
        title,
        {
            "smoke": _of(batch=8, make=resnet18, width=4, pixels=64),
            "cpu": _of(batch=8, make=make, width=16, pixels=64),
            "paper": _of(batch=200, make=make, width=64, pixels=128),
        },
        resnet,
    )


def _regnet(title: str, make: Callable[..., RegNet]) -> Network:
    return Network(
        title,
        {
            "smoke": _of(batch=8, make=regnet_x_200mf, pixels=64),
            "cpu": _of(batch=8, make=make, pixels=32),
            "paper": _of(batch=300, make=make, pixels=128),
        },
        regnet,
    )


def _of(**settings: Any) -> dict[str, Any]:
    return settings


NETWORKS: dict[str, Network] = {
    "gpt2-small": _gpt2("GPT-2 small, 12 layers", 12, 768, 12, 4, 1024, 192),
    "gpt2-medium": _gpt2("GPT-2 medium, 24 layers", 24, 1024, 16, 4, 512, 144),
    "gpt2-large": _gpt2("GPT-2 large, 36 layers", 36, 1280, 20, 2, 512, 128),
    "resnet50": _resnet("ResNet-50", resnet50),
    "resnet101": _resnet("ResNet-101", resnet101),
    "resnet152": _resnet("ResNet-152", resnet152),
    "regnet-x-3.2": _regnet("RegNet-X 3.2 GF", regnet_x_3_2gf),
    "regnet-y-1.6": _regnet("RegNet-Y 1.6 GF", regnet_y_1_6gf),
    "mlp-mixer": Network(
        "MLP-Mixer, 12 layers",
        {
            "smoke": _of(batch=2, pixels=32, patch=8, dim=32, depth=2),
            "cpu": _of(batch=8, pixels=64, patch=8, dim=128, depth=12),
            "paper": _of(batch=120, pixels=256, patch=16, dim=512, depth=12),
        },
        mixer,
    ),
    "transformer": Network(
        "nn.Transformer, 6 + 6 layers",
        {
            "smoke": _of(batch=2, layers=1, width=32, heads=2, length=8),
            "cpu": _of(batch=8, layers=6, width=128, heads=4, length=48),
            "paper": _of(batch=200, layers=6, width=512, heads=16, length=32),
        },
        transformer,
    ),
    "unet": Network(
        "U-Net, 4 levels",
        {
            "smoke": _of(batch=2, width=4, depth=2, pixels=32),
            "cpu": _of(batch=4, width=8, depth=4, pixels=96),
            "paper": _of(batch=50, width=64, depth=4, pixels=256),
        },
        unet,
    ),
    "fno": Network(
        "FNO, 4 layers",
        {
            "smoke": _of(batch=8, modes=4, width=8, depth=4, length=64),
            "cpu": _of(batch=32, modes=16, width=32, depth=4, length=256),
            "paper": _of(batch=4400, modes=16, width=64, depth=4, length=256),
        },
        fno,
    ),
    "gpt": Network(
        "GPT of the table of peers, 8 layers",
        {
            "smoke": _of(batch=2, layers=2, width=64, length=32),
            "cpu": _of(batch=8, layers=8, width=256, length=256),
            "paper": _of(batch=8, layers=8, width=256, length=256),
        },
        peers_gpt,
    ),
    "llama": Network(
        "Llama of transformers, 12 layers",
        {
            "smoke": _of(batch=2, layers=1, width=64, vocab=64, length=16),
            "cpu": _of(batch=4, layers=12, width=256, vocab=1024, length=128),
            "paper": _of(batch=4, layers=12, width=1024, vocab=32000, length=1024),
        },
        llama,
    ),
}


def case_of(name: str, size: str, batch: int = 0, seed: int = 0) -> Case:
    """Return a network by its name: "resnet50", "gpt2-small:48" of another depth, or "gpt2:48"."""
    family, _, depth = name.partition(":")
    if family == "gpt2":
        return gpt2_of_depth(int(depth), size)
    other = {"layers": int(depth)} if depth else {}
    return NETWORKS[family].case(size, batch, seed, **other)


def gpt2_of_depth(layers: int, size: str) -> Case:
    """Return the GPT-2 whose planning time is measured, of any depth.

    The paper's is 1600 wide, which costs a machine without GPU much and changes no plan.
    """
    torch.manual_seed(0)
    if size == "paper":
        return gpt2(2, layers, 1600, 25, 50257, 256)
    return gpt2(2, layers, 64, 2, 256, 64)
