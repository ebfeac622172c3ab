"""Small modules, each with one thing that a graph builder gets wrong easily."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)
from torch.utils.checkpoint import checkpoint

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Function(nn.Module):
    """A linear layer, then any function of (module, x, ...)."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = [body]  # in a list: no submodule, no attribute that a capture would look at
        self.linear = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.body[0](self, x, *args, **kwargs)


def _made(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Made]:
    return lambda: (Function(body), (torch.randn(4, 8), *args), kwargs)


class FourierMixer(nn.Module):
    """A global filter in the frequency domain with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, 5, dtype=torch.cfloat) * 0.1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x, norm="ortho")
        mixed = torch.fft.irfft2(spectrum * self.filter, s=(8, 8), norm="ortho")
        return self.linear(mixed).relu() + torch.fft.fft(x).real


def _complex_linear(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(m.linear(x), m.other(x))
    return (z * z.conj()).real + torch.view_as_real(z).sum(-1) + z.angle()


def _shared_weight(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.linear(x).relu(), m.linear.weight.t()) * m.linear.weight.sum()


def _called_twice(m: Any, x: Tensor) -> Tensor:
    return m.linear(m.linear(x).tanh()) + m.linear(x)


def _nested(m: Any, x: dict[str, Any], flag: bool = True) -> Any:
    y = m.linear(x["a"][0])
    return {"y": y, "list": [y.relu(), (x["a"][1] * 2, None)], "text": "x", "number": 3.5}


def _scaled(m: Any, x: Tensor, scale: float, name: str, *, times: int = 1) -> Tensor:
    y = m.linear(x) * scale
    for _ in range(times):
        y = y + (1 if name == "one" else 2)
    return y


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = m.other(y.float())
        y = m.linear(y)
    return m.other(y.float())


def _autocast_uncached(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        y = m.linear(m.linear(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.linear(m.linear(m.linear(y.float())))
    return y.float()


def _autocast_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            target = m.other(x)
        y = m.linear(m.linear(x))
        with torch.no_grad():
            target = target * 2
        y = m.linear(y) - target
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        z = m.other(x)
    return (y + z).float()


def _enable_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.other(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            z = m.linear(x)
    return (y + z).float()


def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.other(x)
        with torch.enable_grad():
            inner = m.linear(x)
    return F.mse_loss(m.linear(x) + inner, target)


def _buffer(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.state.mul_(0.9).add_(y.detach().mean(0))
    m.state[2:4] += 1
    return y - m.state


def _buffer_assigned(m: Any, x: Tensor) -> Tensor:
    m.state = m.state * 0.5 + x.mean(0)
    return m.linear(x) + m.state


def _slices(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x).clone()
    y[:, 2:4] = x[:, :2]
    y[1] *= 2
    y.view(-1)[3:6].zero_()
    return y.masked_fill_(y > 1, 0.5)


def _indexing(m: Any, x: Tensor, index: Tensor) -> Tensor:
    y = m.linear(x)
    z = torch.zeros_like(y).index_add(0, index, y).scatter_add(0, index[:, None].expand(4, 8), y)
    y = y.index_put((index,), x)
    return torch.cat([y[index], z.gather(0, index[:, None])], dim=1)


def _gumbel(m: Any, x: Tensor) -> Tensor:
    y = F.gumbel_softmax(m.linear(x), tau=0.5, hard=True)
    return (
        F.dropout(m.other(y), 0.3)
        + torch.randn_like(x) * torch.rand(8)
        + torch.bernoulli(x * 0 + 0.5)
    )


def _einsum(m: Any, x: Tensor) -> Tensor:
    y = torch.einsum("ij,kj->ik", m.linear(x), x)
    return torch.linalg.solve(y @ y.mT + 3 * torch.eye(4), x).logsumexp(1) + torch.linalg.norm(y)


def _many_outputs(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    a, b = y.topk(3)
    c, d = y.sort(dim=0)
    e, f = torch.var_mean(y, dim=1)
    return a, b, c.cumsum(0), d, e * 2, f, *y.unbind(1)[:2]


def _same_output(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return y, y, y.view(2, 16), x, m.linear.weight


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda t: m.linear(t).tanh(), x, use_reentrant=False)
    return m.other(y)


def _branch(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if x.sum() > 0 else m.other(x)


def _nonzero(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[x[:, 0] > 0].sum()


def _item(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * x.max().item()


def _input_written(m: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return m.linear(x)


def _prints(m: Any, x: Tensor) -> Tensor:
    print("forward")
    return m.linear(x)


def _python_random(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if random.random() < 2 else x


def _numpy_random(m: Any, x: Tensor) -> Tensor:
    import numpy as np

    return m.linear(x) * float(np.random.rand())


def _seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(m.linear(x))


def _forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        y = F.dropout(m.linear(x))
    return F.dropout(y)


def _own_generator(m: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return m.linear(x) + torch.randn(4, 8, generator=generator)


def _counts(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.linear(x)


def _listed(m: Any, x: Tensor) -> Tensor:
    m.seen = getattr(m, "seen", [])
    m.seen.append(m.linear(x))
    return m.seen[-1]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def _custom_function(m: Any, x: Tensor) -> Tensor:
    return _Doubled.apply(m.linear(x))


def _detached(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return (y.detach() * m.other(x)).sum() + y.softmax(-1).max(dim=1).values.sum()


def _grad_inside(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.linear(x).pow(2).sum(), x, create_graph=True)
    return slope.pow(2).sum()


def _kept_activation(m: Any, x: Tensor) -> Tensor:
    m.last = m.linear(x).detach()
    return m.other(m.last)


def _hooked() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda _m, _i, out: out * 2)
    return model, (torch.randn(4, 8),), {}


def _tensor_hook(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    y.register_hook(lambda grad: grad * 3)
    return m.other(y)


def _backward_hooked() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[1].register_full_backward_hook(lambda _m, grads, _o: (grads[0] * 2,))
    return model, (torch.randn(4, 8),), {}


def _tied() -> Made:
    model = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12, bias=False))
    model[2].weight = model[0].weight
    return model, (torch.randint(12, (3, 5)),), {}


def _frozen() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model[1].eval()
    return model, (torch.randn(4, 8),), {}


def _transformer() -> Made:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return model, (torch.randn(2, 7, 16), torch.randn(2, 5, 16)), {"tgt_mask": mask}


def _told_transformer() -> Made:
    model, args, kwargs = _transformer()
    return model, args, {**kwargs, "tgt_is_causal": True}


def _masked_transformer() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.net(source, target, tgt_mask=mask, tgt_is_causal=True)

    return Masked(), (torch.randn(2, 7, 16), torch.randn(2, 5, 16)), {}


def _packed() -> Made:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return out

    return Packed(), (torch.randn(2, 5, 8), torch.tensor([5, 3])), {}


def _sequence(model: nn.Module) -> Made:
    return model, (torch.randn(5, 3, 8),), {}


def _parametrized(wrap: Callable[[nn.Module], nn.Module]) -> Made:
    return nn.Sequential(wrap(nn.Linear(8, 8)), nn.ReLU()), (torch.randn(4, 8),), {}


def _nested_sample() -> Any:
    return {"a": [torch.randn(4, 8), torch.randn(4, 8)]}


FEATURES: dict[str, Callable[[], Made]] = {
    "FFT layer, complex parameter": lambda: (FourierMixer(), (torch.randn(2, 8, 8),), {}),
    "complex arithmetic": _made(_complex_linear),
    "nn.Transformer, causal mask made inside": _masked_transformer,
    "nn.Transformer, mask among its arguments": _transformer,
    "nn.Transformer, mask and tgt_is_causal": _told_transformer,
    "nn.TransformerEncoder": lambda: _sequence(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    ),
    "LSTM, 2 layers, bidirectional": lambda: _sequence(
        nn.LSTM(8, 8, 2, dropout=0.2, bidirectional=True)
    ),
    "GRU, 2 layers": lambda: _sequence(nn.GRU(8, 8, 2, dropout=0.2)),
    "LSTM on packed sequences": _packed,
    "tied embedding": _tied,
    "one weight used in three ways": _made(_shared_weight),
    "a submodule called twice": _made(_called_twice),
    "nested inputs and outputs": lambda: (Function(_nested), (_nested_sample(),), {}),
    "non-tensor arguments": _made(_scaled, 0.5, "one", times=3),
    "autocast regions, nested": _made(_autocast),
    "autocast with one weight used repeatedly": _made(_autocast_uncached),
    "no_grad inside autocast and around it": _made(_autocast_no_grad),
    "enable_grad inside autocast inside no_grad": _made(_enable_inside),
    "no_grad and enable_grad regions": _made(_no_grad),
    "buffer written in place": _made(_buffer),
    "buffer assigned anew": _made(_buffer_assigned),
    "writes into slices": _made(_slices),
    "gather, scatter, index_put": _made(_indexing, torch.tensor([1, 0, 3, 1])),
    "many kinds of random numbers": _made(_gumbel),
    "einsum and linear algebra": _made(_einsum),
    "operations with several results": _made(_many_outputs),
    "results returned twice, as views, unchanged": _made(_same_output),
    "detach": _made(_detached),
    "forward hook": _hooked,
    "frozen layers, BatchNorm in eval mode": _frozen,
    "weight_norm": lambda: _parametrized(torch.nn.utils.parametrizations.weight_norm),
    "spectral_norm": lambda: _parametrized(torch.nn.utils.parametrizations.spectral_norm),
    "torch.utils.checkpoint inside": _made(_checkpointed),
    "lazy layer before its first input": lambda: (
        nn.Sequential(nn.LazyLinear(4), nn.ReLU()),
        (torch.randn(4, 8),),
        {},
    ),
    "activation kept as attribute": _made(_kept_activation),
    "backward hook on a module": _backward_hooked,
    "hook on a tensor": _made(_tensor_hook),
    "gradient taken inside forward": _made(_grad_inside),
    "branch on data": _made(_branch),
    "size that depends on data": _made(_nonzero),
    ".item()": _made(_item),
    "input written in place": _made(_input_written),
    "print in forward": _made(_prints),
    "Python random in forward": _made(_python_random),
    "numpy random in forward": _made(_numpy_random),
    "torch.manual_seed in forward": _made(_seeded),
    "random numbers in a fork": _made(_forked),
    "random numbers of an own generator": _made(_own_generator),
    "counter in forward": _made(_counts),
    "results kept in a list": _made(_listed),
    "custom autograd.Function": _made(_custom_function),
}
