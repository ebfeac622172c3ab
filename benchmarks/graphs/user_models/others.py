"""Graphs, sequences, sounds, tables, and packages with one or two models of interest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphs.user_models.batches import WORDS, Built, integers_of, keywords, random_of, seeded


class _GraphNet(nn.Module):
    """Two convolutions and a pooling, as in the tutorials of torch_geometric."""

    def __init__(self, make: Callable[[int, int], nn.Module], pooled: bool) -> None:
        super().__init__()
        self.first, self.second = make(8, 16), make(16, 16)
        self.head, self.pooled = nn.Linear(16, 3), pooled

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.first(x, edge_index).relu()
        x = nn.functional.dropout(x, 0.5, self.training)
        x = self.second(x, edge_index)
        if self.pooled:
            return nn.functional.cross_entropy(self.head(global_mean_pool(x, batch)), y)
        return nn.functional.cross_entropy(self.head(x), y[batch])


def graph(name: str, pooled: bool) -> Built:
    """Return two convolutions of torch_geometric on a batch of graphs."""
    from torch_geometric import nn as graph_nn

    make: Callable[[int, int], nn.Module] = getattr(graph_nn, f"{name}Conv")
    if name == "GIN":
        make = lambda a, b: graph_nn.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU()))  # noqa: E731

    def batch(step: int) -> dict[str, Any]:
        generator = seeded(step)
        return {
            "x": torch.randn(30, 8, generator=generator),
            "edge_index": torch.randint(30, (2, 90), generator=generator),
            "batch": torch.arange(30) // 10,
            "y": torch.randint(3, (3,), generator=generator),
        }

    return _GraphNet(make, pooled).train(), keywords(batch)


def from_x_transformers(name: str) -> Built:
    """Return a decoder of x_transformers, with its loss."""
    import x_transformers

    sizes = {"dim": 32, "depth": 2, "heads": 2, "attn_dim_head": 8}
    kinds: dict[str, dict[str, Any]] = {
        "rotary": {"rotary_pos_emb": True, "attn_flash": True},
        "ALiBi": {"alibi_pos_bias": True},
        "layer dropout": {"layer_dropout": 0.2},
        "GLU and RMSNorm": {"ff_glu": True, "use_rmsnorm": True},
    }
    layers = x_transformers.Decoder(**sizes, **kinds[name])
    net = x_transformers.TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers)
    return x_transformers.AutoregressiveWrapper(net).train(), integers_of(WORDS, 2, 17)


def from_torchaudio(name: str) -> Built:
    """Return a model of torchaudio."""
    import torchaudio

    if name == "Conformer":
        model = torchaudio.models.Conformer(16, 2, 32, 2, 7)

        def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            sound = torch.randn(2, 20, 16, generator=seeded(step))
            return (sound, torch.tensor([20, 14 + step])), {}

        return model.train(), batch
    if name == "ConvTasNet":
        sizes = {"enc_num_feats": 16, "msk_num_feats": 16, "msk_num_hidden_feats": 16}
        model = torchaudio.models.ConvTasNet(**sizes, msk_num_layers=2, msk_num_stacks=1)
        return model.train(), random_of(2, 1, 400)
    if name == "DeepSpeech":
        return torchaudio.models.DeepSpeech(16, 32, 10).train(), random_of(2, 1, 12, 16)
    if name == "Wav2Letter":
        return torchaudio.models.Wav2Letter(10, "mfcc", 16).train(), random_of(2, 16, 40)
    model = nn.Sequential(
        torchaudio.transforms.MelSpectrogram(n_fft=64, n_mels=16),
        torchaudio.transforms.AmplitudeToDB(),
        nn.Conv1d(16, 32, 3),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Conv1d(32, 32, 3),
    )
    return model.train(), random_of(2, 2000)


def performer() -> Built:
    """Return a language model with attention by random features."""
    import performer_pytorch

    model = performer_pytorch.PerformerLM(
        num_tokens=WORDS, max_seq_len=32, dim=32, depth=2, heads=2, dim_head=16, causal=False
    )
    return model.train(), integers_of(WORDS, 2, 16)


def tabular() -> Built:
    """Return a model of tables with categories and numbers."""
    import tab_transformer_pytorch

    model = tab_transformer_pytorch.FTTransformer(
        categories=(5, 6), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2
    )

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = seeded(step)
        return (
            torch.randint(5, (8, 2), generator=generator),
            torch.randn(8, 4, generator=generator),
        ), {}

    return model.train(), batch


def operator() -> Built:
    """Return a Fourier neural operator."""
    from neuralop.models import FNO

    model = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2)
    return model.train(), random_of(2, 1, 16, 16)


def ode() -> Built:
    """Return a network with a flow of fixed steps inside."""
    import torchdiffeq

    class Flow(nn.Module):
        """A linear layer, a flow of fixed steps, and a head."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            def slope(_: Tensor, y: Tensor) -> Tensor:
                return torch.tanh(self.inner(y))

            at = torch.linspace(0.0, 1.0, 4)
            return self.head(torchdiffeq.odeint(slope, x, at, method="rk4")[-1])

    return Flow().train(), random_of(16, 8)


def of_small_package(name: str) -> Built:
    """Return a model of a package that has one or two of interest."""
    if name == "EfficientNet-b0":
        from efficientnet_pytorch import EfficientNet

        return EfficientNet.from_name("efficientnet-b0", num_classes=5).train(), random_of(
            2, 3, 64, 64
        )
    if name == "TCN":
        from pytorch_tcn import TCN

        return TCN(8, [16, 16], kernel_size=3).train(), random_of(4, 8, 32)
    if name == "VectorQuantize":
        from vector_quantize_pytorch import VectorQuantize

        layer = VectorQuantize(dim=16, codebook_size=32, decay=0.8)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), layer).train(), random_of(2, 24, 16)
    if name == "FSQ":
        from vector_quantize_pytorch import FSQ

        return nn.Sequential(nn.Linear(16, 4), FSQ([8, 5, 5, 5])).train(), random_of(2, 24, 16)
    if name == "LinearAttentionTransformerLM":
        from linear_attention_transformer import LinearAttentionTransformerLM

        made = LinearAttentionTransformerLM(WORDS, dim=32, depth=2, heads=2, max_seq_len=32)
        return made.train(), integers_of(WORDS, 2, 32)
    if name == "LocalTransformer":
        from local_attention import LocalTransformer

        sizes = {"max_seq_len": 32, "dim": 32, "depth": 2, "heads": 2, "dim_head": 16}
        made = LocalTransformer(num_tokens=WORDS, local_attn_window_size=8, causal=True, **sizes)
        return made.train(), integers_of(WORDS, 2, 16)
    if name == "ReformerLM":
        from reformer_pytorch import ReformerLM

        sizes = {"dim": 32, "depth": 2, "heads": 2, "bucket_size": 8, "max_seq_len": 32}
        return ReformerLM(num_tokens=WORDS, **sizes).train(), integers_of(WORDS, 2, 32)
    if name == "Mamba":
        from mambapy.mamba import Mamba, MambaConfig

        return Mamba(MambaConfig(d_model=16, n_layers=2)).train(), random_of(2, 16, 16)
    if name == "ConformerBlock":
        from conformer import ConformerBlock

        return ConformerBlock(dim=32, dim_head=16, heads=2).train(), random_of(2, 20, 32)
    if name == "Perceiver":
        from perceiver_pytorch import Perceiver

        sizes = {"num_latents": 8, "latent_dim": 16, "num_classes": 4, "latent_dim_head": 8}
        made = Perceiver(num_freq_bands=2, max_freq=4, depth=2, latent_heads=2, **sizes)
        return made.train(), random_of(2, 12, 12, 3)
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    sizes = {"channels": [16] * 5, "attention_channels": 8, "lin_neurons": 16}
    return ECAPA_TDNN(16, **sizes).train(), random_of(2, 30, 16)
