"""The networks are the published ones, and the harness can see what it claims to see."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness import data, meter
from models.GPT import GPT2, GPT2WithLoss
from models.loss import WithLoss
from models.lstm import LSTMLanguageModel
from models.mlp_mixer import MLPMixer
from models.regnet import regnet_x_3_2gf, regnet_x_200mf
from models.resnet import resnet18, resnet50, resnet101
from models.unet import UNet
from reports import readme

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make_model", "parameters"),
    [
        (GPT2, 124_439_808),
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
        (resnet101, 44_549_160),
        (regnet_x_200mf, 2_684_792),
        (regnet_x_3_2gf, 15_296_552),
    ],
)
def test_published_sizes(make_model: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        model = make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def tokens() -> Tensor:
    return torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make_model", "sample", "shape"),
    [
        (lambda: GPT2(2, d_model=32, n_heads=4, vocab=50, max_length=16), tokens, (2, 16, 50)),
        (lambda: LSTMLanguageModel(vocab=50, d_model=32), tokens, (2, 16, 50)),
        (lambda: resnet18(width=8, num_classes=5), images, (2, 5)),
        (lambda: resnet50(width=8, num_classes=5), images, (2, 5)),
        (lambda: regnet_x_200mf(num_classes=5), images, (2, 5)),
        (lambda: UNet(width=8, depth=2), images, (2, 2, 32, 32)),
        (lambda: MLPMixer(image_size=32, patch_size=8, dim=32, depth=2), images, (2, 1000)),
    ],
)
def test_every_parameter_gets_a_gradient(
    make_model: Callable[[], nn.Module], sample: Callable[[], Tensor], shape: tuple[int, ...]
) -> None:
    model = make_model()
    output = model(sample())
    assert output.shape == shape
    output.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_gpt2_is_causal_tied_and_random_only_in_training() -> None:
    model = GPT2(2, 0.5, d_model=32, n_heads=4, vocab=50, max_length=16)
    assert model.head.weight is model.tokens.weight
    idx = tokens()
    assert not torch.equal(model(idx), model(idx))
    model.eval()
    changed = idx.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_losses_inside_the_module() -> None:
    idx = tokens()
    model = GPT2WithLoss(1, 0.0, d_model=32, n_heads=4, vocab=50, max_length=16)
    logits = GPT2.forward(model, idx)
    expected = nn.functional.cross_entropy(logits.transpose(1, 2), idx)
    torch.testing.assert_close(model(idx, idx), expected)
    assert WithLoss(nn.Flatten())(torch.zeros(2, 4), torch.tensor([0, 3])) == torch.log(
        torch.tensor(4.0)
    )


def test_memory_trace_sees_allocations_and_releases() -> None:
    def step() -> None:
        first = torch.empty(3 * 2**18)  # 3 MiB
        del first
        second = torch.empty(2**18)  # 1 MiB
        third = torch.empty(2**18)
        del second, third

    trace = meter.trace_memory(step, CPU)
    mib = meter.MIB
    assert trace.peak_bytes == 3 * mib
    assert trace.held_bytes == (3 * mib, 0, mib, 2 * mib, mib, 0)
    assert sorted(trace.times_ms) == list(trace.times_ms)


def test_random_state_continues_where_it_was() -> None:
    state = meter.RandomState.now()
    first = torch.rand(3)
    assert not state.equals(meter.RandomState.now())
    state.restore()
    assert state.equals(meter.RandomState.now())
    assert torch.equal(torch.rand(3), first)


def test_first_difference_finds_one_changed_bit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    twin = copy.deepcopy(model)
    sample = torch.randn(4, 2)
    model(sample).sum().backward()
    assert meter.first_difference(model, twin) == "0.weight.grad"
    twin(sample).sum().backward()
    assert meter.first_difference(model, twin) is None
    twin[1].running_mean[1] = torch.nextafter(twin[1].running_mean[1], torch.tensor(9.0))
    assert meter.first_difference(model, twin) == "1.running_mean"
    twin[0].bias.grad = None
    assert meter.first_difference(model, twin) == "0.bias.grad"


def test_data_is_the_same_every_time() -> None:
    for make in (lambda: data.text_batches(2, 3, 20), lambda: data.image_batches(2, 3, 16)):
        for (x, y), (again_x, again_y) in zip(make(), make(), strict=True):
            assert torch.equal(x, again_x)
            assert torch.equal(y, again_y)
    x, y = data.text_batches(1, 3, 20)[0]
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_results_replace_only_what_is_between_the_markers() -> None:
    begin, end = readme.markers("results")
    text = f"top\n{begin}old\n{end}bottom\n"
    new = readme.with_part(text, "results", "| new |")
    assert new == f"top\n{begin}\n| new |\n\n{end}bottom\n"
    assert readme.with_part(new, "results", "| new |") == new
    with pytest.raises(ValueError, match="once each"):
        readme.with_part("no markers", "results", "")
