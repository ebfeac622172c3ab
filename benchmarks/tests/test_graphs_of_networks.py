"""rkgb on the published networks, narrow: their graphs compute them, equal layers are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rkgb
from models.GPT import GPT2
from models.lstm import LSTMLanguageModel
from models.mlp_mixer import MLPMixer
from models.resnet import resnet18, resnet101
from models.unet import UNet
from oracles.k_walk import assert_k_gives_gradients
from rkgb.published.check import assert_same_as_module


def tokens() -> Tensor:
    return torch.randint(50, (2, 8))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "GPT-2": (lambda: GPT2(2, 0.1, d_model=16, n_heads=2, vocab=50, max_length=8), tokens),
    "LSTM": (lambda: LSTMLanguageModel(vocab=50, d_model=16), tokens),
    "ResNet-18": (lambda: resnet18(width=4, num_classes=5), images),
    "U-Net": (lambda: UNet(width=4, depth=2), images),
    "MLP-Mixer": (lambda: MLPMixer(image_size=32, patch_size=8, dim=16, depth=2), images),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_graphs_compute_the_network_and_k_its_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, sample = NETWORKS[name]
    model, x = make().train(), sample()
    result = rkgb.make_all_graphs(model, x, cost="flops")
    for graph in (result.B_graph, result.D_graph, result.S_graph):
        assert_same_as_module(graph, model, x)
    for seed in (None, 1):
        assert_k_gives_gradients(result.K_graph, result.S_graph, model, x, seed=seed)


def classes_of(model: nn.Module, x: Tensor) -> tuple[list[rkgb.SimplifiedGraph], list[list[int]]]:
    bg = rkgb.Btools.make_B(model, x)
    pieces = rkgb.Stools.cut(rkgb.Stools.D_to_S(rkgb.Dtools.B_to_D(bg, model, x)))
    keys = [rkgb.Atools.anonymize(piece).key for piece in pieces]
    return pieces, rkgb.Atools.equivalence_classes(keys)


def test_all_layers_of_a_gpt2_are_equal() -> None:
    model = GPT2(12, 0.1, d_model=16, n_heads=2, vocab=50, max_length=8).train()
    pieces, classes = classes_of(model, tokens())
    counts = sorted(len(members) for members in classes)
    # Attention and perceptron of every layer; the dropout of the embedding is two pieces, what it
    # draws and what it scales.
    assert counts == [1, 1, 1, 1, 1, 1, 12, 12]
    for members in classes:
        if len(members) == 12:
            layers = [{n.module_path.split(".")[1] for n in pieces[i].nodes} for i in members]
            assert layers == [{str(number)} for number in range(12)]


def test_all_equal_layers_of_a_resnet101_are_found() -> None:
    pieces, classes = classes_of(resnet101(width=4, num_classes=5).train(), images())
    large = {
        pieces[members[0]].nodes[0].module_path.split(".")[0]: len(members)
        for members in classes
        if len(members) > 1
    }
    # Of 3, 4, 23 and 3 blocks per stage all but the first, which changes the width.
    assert large == {"layer1": 2, "layer2": 3, "layer3": 22, "layer4": 2}
