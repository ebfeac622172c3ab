"""The subjects of `step.py`: what is measured on which network, and the figure aimed at.

Every network is of a size at which what Python does between operations weighs much: that is what
the benchmark is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.GPT import GPT2WithLoss
from models.loss import WithLoss
from models.resnet import resnet18, resnet50

KINDS = ("step", "recomputed", "capture", "planned")


@dataclass(frozen=True)
class Subject:
    """One thing to measure; `name` is what `--only` and `--profile` look for."""

    name: str
    kind: str  # "step", "recomputed", "capture" or "planned"
    network: str
    title: str
    target: float | None  # ratio over plain, seconds, or percentage points: see `kind`
    budget: float = 1.0  # a fraction of the plain peak


@dataclass(frozen=True)
class StepCase:
    """A network in train mode, one batch, and its layers where checkpoints are put around them."""

    model: nn.Module
    sample: tuple[Tensor, ...]
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None


class Lines(nn.Module):
    """A chain of layers that are short, with many parameters."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layers = [(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)]
        self.layers = nn.Sequential(*(module for group in layers for module in group))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a residual, at one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class Unrolled(nn.Module):
    """One GRU cell run over a sequence: every use shares its weights. Returns all states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        states = []
        for step in x.unbind(0):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states)


def lines(depth: int) -> StepCase:
    """Linear, GELU, LayerNorm, again and again."""
    return StepCase(Lines(depth, 64), (torch.randn(32, 64),))


def encoder(depth: int) -> StepCase:
    """PyTorch's own encoder layers."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return StepCase(model, (torch.randn(4, 32, 64),), lambda m: list(m.layers))


def residual(depth: int) -> StepCase:
    """Residual blocks of 16 channels."""
    model = nn.Sequential(*(Residual(16) for _ in range(depth)))
    return StepCase(model, (torch.randn(4, 16, 16, 16),))


def unrolled(length: int) -> StepCase:
    """A GRU cell over a sequence of vectors."""
    return StepCase(Unrolled(64), (torch.randn(length, 8, 64),))


def gpt2(layers: int, width: int = 256, batch: int = 2, length: int = 64) -> StepCase:
    """A GPT-2 over bytes, its loss inside."""
    model = GPT2WithLoss(
        layers, 0.1, d_model=width, n_heads=max(1, width // 64), vocab=256, max_length=length
    )
    text = torch.randint(256, (batch, length + 1))
    return StepCase(model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()))


def resnet(make: Callable[..., nn.Module], width: int, pixels: int) -> StepCase:
    """A ResNet on small images, its loss inside."""
    model = WithLoss(make(width=width, num_classes=10))
    return StepCase(model, (torch.randn(4, 3, pixels, pixels), torch.randint(10, (4,))))


def densenet(blocks: Sequence[int]) -> StepCase:
    """DenseNet-121, or one of fewer layers."""
    from rotor.models.densenet import DenseNet  # of the checkout that is measured

    return StepCase(DenseNet(block_config=blocks, num_classes=10), (torch.randn(2, 3, 64, 64),))


def recorded(network: str, size: str) -> StepCase:
    """A network of the experiments, as `Performance_exp.py` measures it."""
    from harness.networks import NETWORKS

    found = NETWORKS[network].case(size)
    return StepCase(found.model, found.sample)


Maker = Callable[[], StepCase]
of = functools.partial
# network -> how to make it in full, and tiny
NETS: dict[str, tuple[Maker, Maker]] = {
    "lin40": (of(lines, 40), of(lines, 2)),
    "enc8": (of(encoder, 8), of(encoder, 2)),
    "res16": (of(residual, 16), of(residual, 1)),
    "gru20": (of(unrolled, 20), of(unrolled, 2)),
    "gpt2_12": (of(gpt2, 12), of(gpt2, 1, 32, 2, 8)),
    "gpt2_48": (of(gpt2, 48), of(gpt2, 2, 32, 2, 8)),
    "gpt2_96": (of(gpt2, 96), of(gpt2, 3, 32, 2, 8)),
    "resnet50": (of(resnet, resnet50, 64, 64), of(resnet, resnet18, 4, 32)),
    "densenet121": (of(densenet, (6, 12, 24, 16)), of(densenet, (1, 1))),
}
OTHERS = {
    "gpt2-small": "GPT-2, 12 layers",
    "resnet50": "ResNet-50",
    "transformer": "nn.Transformer",
    "mlp-mixer": "MLP-Mixer",
    "unet": "U-Net",
}
SMOKE = ("lin40", "recomputed_enc8", "capture_gpt2_12", "planned_gpt2-small_60")


def subjects() -> list[Subject]:
    """Return everything that is measured, in the order of the table."""
    found = [
        Subject("lin40", "step", "lin40", "40 × Linear, GELU, LayerNorm", 1.0),
        Subject("enc8", "step", "enc8", "8 nn.TransformerEncoderLayer", 0.85),
        Subject("res16", "step", "res16", "16 residual blocks with BatchNorm", 0.95),
        Subject("gru20", "step", "gru20", "nn.GRUCell over 20 steps", 0.7),
        Subject("gpt2_12", "step", "gpt2_12", "GPT-2, 12 layers, d = 256", 1.0),
        Subject("gpt2_48", "step", "gpt2_48", "GPT-2, 48 layers, d = 256", 1.0),
        Subject("resnet50", "step", "resnet50", "ResNet-50, 64 × 64 pixels", 1.0),
        Subject("recomputed_enc8", "recomputed", "enc8", "8 nn.TransformerEncoderLayer", 1.2),
        Subject("capture_gpt2_12", "capture", "gpt2_12", "GPT-2, 12 layers", 0.5),
        Subject("capture_gpt2_48", "capture", "gpt2_48", "GPT-2, 48 layers", 1.0),
        Subject("capture_gpt2_96", "capture", "gpt2_96", "GPT-2, 96 layers", 2.0),
        Subject("capture_densenet121", "capture", "densenet121", "DenseNet-121", 1.0),
    ]
    for network, title in OTHERS.items():
        for percent in (60, 50 if network == "unet" else 40):  # a U-Net has no plan within 40 %
            name = f"planned_{network}_{percent}"
            found.append(
                Subject(name, "planned", network, f"{title}, {percent} %", 3.0, percent / 100)
            )
    return found


def chosen(only: Sequence[str], smoke: bool) -> list[Subject]:
    """Return the subjects that the texts name: by their whole names or, else, by parts of them.

    Without a text these are all, or the few that are measured to see that everything runs.
    """
    every = subjects()
    names = {subject.name for subject in every}
    if not only:
        return [s for s in every if not smoke or s.name in SMOKE]

    def named(name: str, text: str) -> bool:
        return name == text if text in names else text in name

    return [s for s in every if any(named(s.name, text) for text in only)]


def build(subject: Subject, smoke: bool) -> StepCase:
    """Return the network of a subject; the same one at every call."""
    torch.manual_seed(0)
    if subject.kind == "planned":
        case = recorded(subject.network, "smoke" if smoke else "cpu")
    else:
        case = NETS[subject.network][smoke]()
    case.model.train()
    return case
