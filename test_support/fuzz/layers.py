"""Forms of layers that compute: each a few lines of PyTorch that take `x` and leave `x`.

`_N` in a text is the layer's number. Every form keeps the shape of `x`, so that any layer can be
left out. Rows are (batch, 8), sequences (batch, 5, 8), images (batch, 8, 4, 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

KINDS = {"rows": (8,), "sequence": (5, 8), "image": (8, 4, 4)}
BASES = {"rows": "linear", "sequence": "linear", "image": "convolution"}  # what trains
LAST = ("rows", "sequence")  # where the last dimension has 8 numbers


@dataclass(frozen=True)
class Form:
    """How a layer is written: lines on top of the script, of `__init__`, of `forward`."""

    forward: str
    init: str = ""
    top: str = ""
    changes: tuple[str, ...] = ()  # what a loop may do to what it reads; `OWN` is its module
    kinds: tuple[str, ...] = tuple(KINDS)
    weight: float = 1.0


def _module(made: str, *, kinds: tuple[str, ...] = LAST, weight: float = 1.0) -> Form:
    return Form("x = self.layer_N(x)", f"self.layer_N = {made}", kinds=kinds, weight=weight)


def of_function(forward: str, backward: str, top: str = "", **more: Any) -> Form:
    """Return a layer that calls a Function of its own; `top` stands below the Function."""
    own = (
        "class Function_N(torch.autograd.Function):\n"
        f"    @staticmethod\n    def forward(ctx, x):\n        {forward}\n\n"
        f"    @staticmethod\n    def backward(ctx, grad):\n        {backward}\n"
    )
    return Form("x = Function_N.apply(x)", top=own + top, **more)


ROWS = {
    "linear": _module("nn.Linear(8, 8)", weight=6),
    "linear without bias": _module("nn.Linear(8, 8, bias=False)"),
    "layer norm": _module("nn.LayerNorm(8)", weight=2),
    "rms norm": _module("nn.RMSNorm(8)"),
    "batch norm of rows": _module("nn.BatchNorm1d(8)", kinds=("rows",), weight=2),
    "momentless batch norm": _module("nn.BatchNorm1d(8, momentum=None)", kinds=("rows",)),
    "perceptron": _module(
        "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))", weight=2
    ),
    "in-place perceptron": _module(
        "nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))", weight=2
    ),
    "weight norm": _module("nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))"),
    "orthogonal": _module("nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))", weight=0.3),
    "spectral norm": _module("nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))", weight=2),
    "old spectral norm": _module("nn.utils.spectral_norm(nn.Linear(8, 8))", weight=2),
    "pruned": _module("prune.l1_unstructured(nn.Linear(8, 8), 'weight', 0.3)"),
    "gru": Form(
        "x = self.gru_N(x)[0]", "self.gru_N = nn.GRU(8, 8, batch_first=True)", kinds=("sequence",)
    ),
    "lstm": Form(
        "x = self.lstm_N(x)[0]",
        "self.lstm_N = nn.LSTM(8, 8, batch_first=True)",
        kinds=("sequence",),
        weight=2,
    ),
    "two-way lstm": Form(
        "x = self.lstm_N(x)[0]",
        "self.lstm_N = nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True)",
        kinds=("sequence",),
        weight=2,
    ),
    "lstm with dropout": Form(
        "x = self.lstm_N(x)[0]",
        "self.lstm_N = nn.LSTM(8, 8, num_layers=2, dropout=0.2)",
        kinds=("sequence",),
    ),
    "state of an lstm": Form(
        "state_N = self.lstm_N(x)[1]\nx = x + (state_N[0] * state_N[1]).transpose(0, 1)",
        "self.lstm_N = nn.LSTM(8, 8, batch_first=True)",
        kinds=("sequence",),
    ),
    "lstm cell": Form(
        "state_N = (torch.zeros_like(x), torch.zeros_like(x))\n"
        "for _ in range(3):\n    state_N = self.cell_N(x, state_N)\nx = state_N[0]",
        "self.cell_N = nn.LSTMCell(8, 8)",
        kinds=("rows",),
    ),
    "rnn over time": Form(
        "state_N, steps_N = x[:, 0] * 0, []\nfor step_N in x.unbind(1):\n"
        "    state_N = self.cell_N(step_N, state_N)\n    steps_N.append(state_N)\n"
        "x = torch.stack(steps_N, 1)",
        "self.cell_N = nn.RNNCell(8, 8)",
        kinds=("sequence",),
    ),
    "attention": Form(
        "x = x + self.attention_N(x, x, x, need_weights=False)[0]",
        "self.attention_N = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)",
        kinds=("sequence",),
        weight=2,
    ),
    "attention with weights": Form(
        "seen_N, weights_N = self.attention_N(x, x, x)\nx = x + seen_N * weights_N.mean()",
        "self.attention_N = nn.MultiheadAttention(8, 2, batch_first=True)",
        kinds=("sequence",),
    ),
    "fused attention": Form(
        "q_N, k_N, v_N = self.qkv_N(x).chunk(3, -1)\n"
        "x = F.scaled_dot_product_attention(q_N, k_N, v_N, is_causal=True)",
        "self.qkv_N = nn.Linear(8, 24)",
        kinds=("sequence",),
        weight=2,
    ),
    "transformer layer": _module(
        "nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)", kinds=("sequence",)
    ),
    "convolution over time": Form(
        "x = self.conv_N(x.transpose(1, 2)).transpose(1, 2)",
        "self.conv_N = nn.Conv1d(8, 8, 3, padding=1)",
        kinds=("sequence",),
        weight=2,
    ),
    "tied": Form(
        "x = self.second_N(torch.tanh(self.first_N(x)))",
        "self.first_N, self.second_N = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        "self.second_N.weight = self.first_N.weight",
    ),
    "transposed weight": Form(
        "x = F.linear(torch.tanh(self.layer_N(x)), self.layer_N.weight.T)",
        "self.layer_N = nn.Linear(8, 8)",
    ),
    "gated halves": Form(
        "a_N, b_N = x.chunk(2, -1)\nx = torch.cat([b_N, a_N * torch.sigmoid(b_N)], -1)"
    ),
    "slice written": Form("x = x.clone()\nx[..., :2] = torch.tanh(x[..., -2:])"),
    "slice scaled": Form("x = x * 1.0\nx[..., ::2].mul_(0.5)"),
    "view written": Form("x = torch.sin(x)\nview_N = x.flatten()\nview_N[::3].add_(0.5)"),
    "row added in place": Form(
        "x = x.clone()\nx += self.row_N", "self.row_N = nn.Parameter(torch.randn(8))"
    ),
    "look-up": Form(
        "x = x + self.table_N(x.detach().argmax(-1))", "self.table_N = nn.Embedding(8, 8)"
    ),
    "sparse look-up": Form(
        "x = x + self.table_N(x.detach().argmax(-1))",
        "self.table_N = nn.Embedding(8, 8, sparse=True)",
        weight=0.5,
    ),
    "sum of a bag": Form(
        "x = x + self.bag_N(x.detach().flatten(0, -2).topk(3)[1]).view_as(x)",
        "self.bag_N = nn.EmbeddingBag(8, 8, mode='sum')",
    ),
    "bilinear": Form("x = self.both_N(x, x)", "self.both_N = nn.Bilinear(8, 8, 8)", weight=0.5),
    "outer product": Form("x = torch.einsum('...i,...j->...ij', x, x).softmax(-1).mean(-2)"),
    "frequencies": Form(
        "x = torch.fft.irfft(torch.fft.rfft(x) * self.filter_N, n=8)",
        "self.filter_N = nn.Parameter(torch.randn(5, dtype=torch.cfloat))",
    ),
    "complex pairs": Form(
        "pairs_N = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2).contiguous())\n"
        "x = torch.view_as_real(pairs_N * pairs_N.conj() + pairs_N).flatten(-2)"
    ),
    "experts": Form(
        "gate_N = self.gate_N(x).softmax(-1)\n"
        "x = sum(gate_N[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts_N))",
        "self.gate_N = nn.Linear(8, 2)\n"
        "self.experts_N = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
    ),
    "smoothed loss of a head": Form(
        "x = x * F.cross_entropy(self.head_N(x).flatten(0, -2), x.detach().flatten(0, -2)"
        ".argmax(-1), self.rates_N, label_smoothing=0.1)",
        "self.head_N = nn.Linear(8, 8)\nself.register_buffer('rates_N', torch.linspace(1, 2, 8))",
    ),
    "distances": Form("x = x + torch.cdist(x, x).mean(-1, keepdim=True)", weight=0.5),
    "loss of a head": Form(
        "x = x * F.cross_entropy(self.head_N(x).flatten(0, -2), x.detach().flatten(0, -2)"
        ".argmax(-1))",
        "self.head_N = nn.Linear(8, 8)",
    ),
    "fused loss of a head": Form(
        "x = x * F.linear_cross_entropy(x.flatten(0, -2), self.weight_N, "
        "x.detach().flatten(0, -2).argmax(-1))",
        "self.weight_N = nn.Parameter(torch.randn(8, 8))",
    ),
}

ROWS = {
    name: replace(form, kinds=tuple(kind for kind in form.kinds if kind in LAST))
    for name, form in ROWS.items()
}

ANY = {
    "tanh": Form("x = torch.tanh(x)", weight=3),
    "relu": Form("x = F.relu(x)", weight=2),
    "gelu": Form("x = F.gelu(x)", weight=2),
    "leaky in place": Form("x = F.leaky_relu(x + 0, 0.1, inplace=True)"),
    "silu": Form("x = x * torch.sigmoid(x)"),
    "dropout": Form(
        "x = self.drop_N(x)",
        "self.drop_N = nn.Dropout(0.2)",
        weight=3,
        changes=("OWN.drop_N.p = VALUE / 10",),
    ),
    "dropout of a function": Form("x = F.dropout(x, 0.3, self.training)"),
    "noise": Form("x = x + 0.1 * torch.randn_like(x)"),
    "seeds of noise": Form("x = x + torch.rand(x.shape[-1])"),
    "softmax": Form("x = x.softmax(-1)"),
    "normalized": Form("x = F.normalize(x, dim=-1)"),
    "running sum": Form("x = x.cumsum(-1) * 0.5"),
    "sorted": Form("x = x.sort(-1)[0]"),
    "largest": Form("x = x * (x >= x.topk(2, -1)[0][..., -1:])"),
    "gathered": Form("x = x.gather(-1, x.detach().argsort(-1))"),
    "where": Form("x = torch.where(x > 0, x, torch.expm1(x))"),
    "masked in place": Form("x = x * 2\nx.masked_fill_(x < -1, 0.0)"),
    "rolled": Form("x = torch.roll(x, 1, -1) + x.flip(-1)"),
    "transposed copy": Form("x = x.transpose(0, -1).contiguous().transpose(0, -1)"),
    "turned in place": Form(
        "x = x * 1.0\nbefore_N = x + 1\nx.transpose_(0, -1)\nx = x.exp().clamp(max=3)\n"
        "x.unsqueeze_(0).squeeze_(0)\nx = x.transpose(0, -1) + before_N"
    ),
    "expanded": Form("x = x + x.mean(-1, keepdim=True).expand_as(x)"),
    "strided": Form("x = x.as_strided(x.shape, x.stride()) * 2"),
    "double": Form("x = torch.tanh(x.double()).float()"),
    "bfloat": Form("x = torch.tanh(x.bfloat16()).float() + x"),
    "autocast": Form(
        "with torch.autocast(x.device.type, torch.bfloat16):\n"
        "    y_N = x.transpose(-1, -2) @ x\nx = x + y_N.float().mean()",
        kinds=("sequence", "image"),
    ),
    "without gradients": Form(
        "with torch.no_grad():\n    scale_N = x.abs().amax()\nx = x / (scale_N + 1)"
    ),
    "detached": Form("x = x + torch.tanh(x).detach()"),
    "straight through": Form("x = x + (x.round() - x).detach()"),
    "parameter used twice": Form(
        "x = x * self.scale_N + self.scale_N", "self.scale_N = nn.Parameter(torch.ones(1))"
    ),
    "unused parameter": Form("x = x + 1", "self.idle_N = nn.Parameter(torch.ones(3))"),
    "logarithm": Form("x = torch.log1p(x.abs()) + torch.logsumexp(x, -1, keepdim=True)"),
    "padded": Form("x = F.pad(x, (1, 1))[..., 1:-1] * x"),
    "split and joined": Form("x = torch.cat([part * 2 for part in x.split(3, -1)], -1)"),
    "a view of a result": Form("x = torch.exp(-x.abs())\nx = x.view(x.shape).unsqueeze(0)[0]"),
    "clamped": Form("x = x.clamp(-1, 1).pow(2) + x.clamp_min(0.1).sqrt()"),
    "standardized": Form("x = (x - x.mean()) / (x.var(unbiased=False) + 0.1).sqrt()"),
    "product": Form("x = x + 0.01 * x.prod(-1, keepdim=True)"),
    "trained filling": Form(
        "x = x.masked_fill(x > 0.5, self.fill_N)", "self.fill_N = nn.Parameter(torch.zeros(()))"
    ),
    "running product": Form("x = x + 0.1 * torch.cumprod(torch.tanh(x), -1)"),
    "running maximum": Form("x = x + x.cummax(-1)[0]"),
    "scattered": Form("x = torch.zeros_like(x).scatter_add(-1, x.detach().argsort(-1), x) + x"),
    "norms": Form("x = x / (1 + x.norm(dim=-1, keepdim=True)) + x.std(-1, keepdim=True)"),
    "between": Form("x = torch.lerp(x, torch.sin(x), 0.3).addcmul(x, x.sigmoid(), value=0.5)"),
    "written through a mask": Form("x = x * 1.0\nx[x > 1] = 0.5"),
    "copied into": Form("out_N = torch.empty_like(x)\nout_N.copy_(torch.sin(x))\nx = out_N + x"),
    "into its own memory": Form(
        "with torch.no_grad():\n    out_N = torch.empty_like(x)\n    torch.mul(x, 0.5, out=out_N)\n"
        "x = x + out_N"
    ),
    "checkpoint": Form("x = checkpoint(lambda t: torch.tanh(t) * t, x, use_reentrant=False)"),
}

IMAGES = {
    "convolution": _module("nn.Conv2d(8, 8, 3, padding=1)", kinds=("image",), weight=5),
    "depthwise": _module("nn.Conv2d(8, 8, 3, padding=1, groups=8)", kinds=("image",)),
    "pointwise": _module("nn.Conv2d(8, 8, 1, bias=False)", kinds=("image",), weight=2),
    "batch norm": _module("nn.BatchNorm2d(8)", kinds=("image",), weight=4),
    "batch norm and relu": _module(
        "nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True))", kinds=("image",), weight=2
    ),
    "group norm": _module("nn.GroupNorm(2, 8)", kinds=("image",), weight=2),
    "instance norm": _module("nn.InstanceNorm2d(8, affine=True)", kinds=("image",)),
    "running instance norm": _module(
        "nn.InstanceNorm2d(8, track_running_stats=True)", kinds=("image",)
    ),
    "dropout of channels": _module("nn.Dropout2d(0.2)", kinds=("image",)),
    "spectral convolution": _module(
        "nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))", kinds=("image",)
    ),
    "pooled": Form("x = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)", kinds=("image",)),
    "average": Form("x = x * F.adaptive_avg_pool2d(x, 1).sigmoid()", kinds=("image",)),
    "shuffled": Form("x = F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)", kinds=("image",)),
    "transposed convolution": Form(
        "x = self.up_N(F.avg_pool2d(x, 2))",
        "self.up_N = nn.ConvTranspose2d(8, 8, 2, stride=2)",
        kinds=("image",),
    ),
    "channels last": Form(
        "x = x.contiguous(memory_format=torch.channels_last)", kinds=("image",), weight=2
    ),
    "resized": Form("x = F.interpolate(x, size=(4, 4), mode='bilinear') + x", kinds=("image",)),
}
