"""The models against torchvision's: weights both ways, equal outputs, and training in a limit.

torchvision is needed by these tests alone. On a CPU build of torch its wheel imports only once the
operators that it lacks have been declared.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch import nn

import rotor
from oracles.checkpointables import assert_trains_like, one_millisecond, peak_of
from rotor import Checkpointable
from rotor.models import inception
from rotor.models.inception import InceptionOutputs
from rotor.models.utils import ReLUAtEnd

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
FUNCTIONS = [
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "inception_v3",
]


@pytest.fixture(scope="module")
def vision():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed: nothing to compare with")
    # Beside a CPU build of torch, torchvision cannot load the library that declares these.
    for name in ("nms", "qnms") if torch.version.cuda is None else ():
        # It may be declared already, by another test module.
        with contextlib.suppress(RuntimeError):
            torch.library.define(f"torchvision::{name}", SCHEMA)
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:
        pytest.skip(f"torchvision cannot be imported here: {error}")


def unset(make, models):
    """A model with whatever lies in its memory: `randomise` or `load_state_dict` follows."""
    with torch.device("meta"):
        model = make(models)
    return model.to_empty(device="cpu")


def small_resnet(models, block="BasicBlock", **arguments):
    kind = getattr(models.resnet, block)
    return models.resnet.ResNet(kind, [2, 1, 1, 2], num_classes=7, **arguments)


def small_vgg(models, name="vgg11_bn"):
    """The real features, and a head that is narrow: its weights would be most of the test."""
    with torch.device("meta"):
        model = getattr(models, name)(num_classes=7, init_weights=False)
        head = model.classifier
        narrow = {"0": nn.Linear(512 * 7 * 7, 8), "3": nn.Linear(8, 8), "6": nn.Linear(8, 7)}
        for place, linear in narrow.items():
            inside = head._modules[place]
            head._modules[place] = ReLUAtEnd(linear) if isinstance(inside, ReLUAtEnd) else linear
    return model.to_empty(device="cpu")


def small_densenet(models, **arguments):
    return models.densenet.DenseNet(
        growth_rate=8, block_config=(2, 3, 2, 2), num_init_features=16, num_classes=7, **arguments
    )


def small_inception(models):
    return models.inception_v3(num_classes=7, init_weights=False)


def randomise(model):
    """Give every weight and statistic a value that matters, whatever the constructor did."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                fan = max(tensor[0].numel(), 1) if tensor.dim() > 1 else 4
                nn.init.normal_(tensor, std=fan**-0.5)
            if "running_var" in name or (name.endswith("weight") and tensor.dim() == 1):
                nn.init.uniform_(tensor, 0.5, 1.5)
            if not tensor.is_floating_point():
                tensor.zero_()
    return model


PAIRS = {
    "resnet": (small_resnet, (2, 3, 33, 33)),
    "resnext": (
        lambda m: small_resnet(m, "Bottleneck", groups=4, width_per_group=8),
        (2, 3, 33, 33),
    ),
    "vgg": (lambda m: small_vgg(m, "vgg11"), (2, 3, 32, 32)),
    "vgg_bn": (small_vgg, (2, 3, 32, 32)),
    "densenet": (small_densenet, (2, 3, 33, 33)),
    "inception": (small_inception, (1, 3, 75, 75)),
}


@pytest.mark.parametrize("family", PAIRS)
def test_weights_move_both_ways_and_outputs_are_equal(vision, family):
    make, shape = PAIRS[family]
    ours = randomise(unset(make, rotor.models).double()).eval()
    theirs = randomise(unset(make, vision).double()).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(*shape, dtype=torch.float64)
    with torch.no_grad():
        assert not torch.equal(ours(x), theirs(x))
        weights = copy.deepcopy(ours.state_dict())
        theirs.load_state_dict(weights)
        assert torch.equal(ours(x), theirs(x))
        theirs.load_state_dict(randomise(theirs).state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))
        assert torch.isfinite(ours(x)).all()


@pytest.mark.parametrize("family", ["resnet", "vgg_bn", "densenet"])
def test_training_mode_agrees_too(vision, family):
    make, shape = PAIRS[family]
    ours, theirs = randomise(unset(make, rotor.models).double()), unset(make, vision).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, dtype=torch.float64)
    for module in (ours, theirs):
        torch.manual_seed(3)
        module(x).square().sum().backward()
    grads = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        # A concatenation step by step sums its gradients in another order than one at the end.
        expected = grads[name.replace("module.", "")].grad
        torch.testing.assert_close(parameter.grad, expected)
    for mine, his in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, his)


def test_auxiliary_logits_agree(vision):
    """The auxiliary classifier needs full-size images: one run, in single precision."""
    ours = randomise(unset(small_inception, rotor.models))
    theirs = unset(small_inception, vision)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 299, 299)
    outputs = []
    for module in (ours, theirs):
        torch.manual_seed(3)
        with torch.no_grad():
            outputs.append(module(x))
    assert isinstance(outputs[0], InceptionOutputs)
    assert outputs[0]._fields == outputs[1]._fields
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].aux_logits, outputs[1].aux_logits)


class Gelu(nn.Module):
    """A convolution without normalisation, that keeps what it was called with."""

    calls: ClassVar[list] = []

    def __init__(self, *channels, **arguments):
        super().__init__()
        self.calls.append((channels, arguments))
        self.conv = nn.Conv2d(*channels, **arguments)

    def forward(self, x):
        return nn.functional.gelu(self.conv(x))


class PooledLogits(nn.Module):
    """An auxiliary classifier for images of any size."""

    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, x):
        return self.fc(x.mean((2, 3)))


def inception_of_gelus(models, blocks):
    """Every convolution replaced, in the blocks too, and the auxiliary classifier as a whole."""
    inner = [functools.partial(block, conv_block=Gelu) for block in blocks]
    arguments = {"num_classes": 7, "init_weights": False, "dropout": 0.0}
    return models.inception_v3(inception_blocks=[Gelu, *inner, PooledLogits], **arguments)


def blocks_of(module, names):
    return [getattr(module, name) for name in names]


OUR_BLOCKS = [f"inception_{letter}" for letter in "abcde"]
THEIR_BLOCKS = [f"Inception{letter}" for letter in "ABCDE"]


@pytest.mark.parametrize("source", ["ours", "theirs"])
def test_inception_blocks_are_made_and_run_as_by_torchvision(vision, source):
    """Our blocks with a caller's convolutions, and torchvision's own blocks in our network."""
    their_blocks = blocks_of(vision.inception, THEIR_BLOCKS)
    blocks = blocks_of(inception, OUR_BLOCKS) if source == "ours" else their_blocks
    Gelu.calls.clear()
    ours = inception_of_gelus(rotor.models, blocks).double()
    made = list(Gelu.calls)
    Gelu.calls.clear()
    theirs = inception_of_gelus(vision, their_blocks).double()
    assert made == Gelu.calls
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(randomise(theirs).state_dict())
    x = torch.randn(2, 3, 75, 75, dtype=torch.float64)
    with torch.no_grad():
        mine, his = ours(x), theirs(x)
        assert torch.equal(mine.logits, his.logits)
        assert torch.equal(mine.aux_logits, his.aux_logits)
        assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("count", [0, 6, 8])
def test_a_wrong_number_of_inception_blocks_is_torchvisions_error(vision, count):
    messages = []
    for models in (rotor.models, vision):
        with pytest.raises(ValueError, match="inception_blocks") as caught:
            models.inception_v3(inception_blocks=[Gelu] * count, init_weights=False)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_inception_takes_its_arguments_in_torchvisions_order(vision):
    ours = inspect.signature(inception.Inception3).parameters
    assert list(ours) == list(inspect.signature(vision.Inception3).parameters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_full_size_members_have_the_names_and_shapes(vision, name):
    with torch.device("meta"):
        ours = getattr(rotor.models, name)()
        arguments = {"init_weights": False} if name == "inception_v3" else {}
        theirs = getattr(vision, name)(**arguments)
    mine = {key: tuple(value.shape) for key, value in ours.state_dict().items()}
    assert mine == {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert list(mine) == list(theirs.state_dict())


def test_every_function_of_torchvision_is_there(vision):
    for family in ("resnet", "vgg", "densenet", "inception"):
        functions = {n for n in getattr(vision, family).__all__ if n[0].islower()}
        ours = getattr(rotor, family)
        assert functions <= set(ours.__all__)
        assert ours is getattr(rotor.models, family)


def test_options_of_the_constructors(vision):
    arguments = {
        "replace_stride_with_dilation": [False, True, True],
        "norm_layer": lambda width: nn.GroupNorm(4, width),
    }
    ours = small_resnet(rotor.models, "Bottleneck", zero_init_residual=True, **arguments).double()
    theirs = small_resnet(vision, "Bottleneck", **arguments).double()
    assert all(not block.bn3.weight.any() for block in ours.layer1)
    theirs.load_state_dict(randomise(ours).state_dict())
    x = torch.randn(1, 3, 33, 33, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(ours.eval()(x), theirs.eval()(x))
    plain = rotor.models.inception_v3(aux_logits=False, transform_input=True, init_weights=False)
    his = vision.inception_v3(aux_logits=False, transform_input=True, init_weights=False)
    his.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 75, 75)
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), his.eval()(x))


def test_weights_are_loaded_from_a_state_dict_or_an_entry():
    source = rotor.models.resnet18(num_classes=3)

    class Entry:
        meta = {"categories": ["a", "b", "c"]}  # noqa: RUF012 - as torchvision's entries have it

        def get_state_dict(self, *, progress, check_hash):
            return source.state_dict()

    for weights in (Entry(), source.state_dict()):
        loaded = rotor.models.resnet18(weights=weights, num_classes=3)
        assert torch.equal(loaded.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    assert rotor.models.resnet18(weights=Entry()).fc.out_features == 3
    with pytest.raises(ValueError, match="num_classes is 5, and the weights are for 3"):
        rotor.models.resnet18(weights=Entry(), num_classes=5)


def test_old_densenet_keys_are_understood():
    source = rotor.models.densenet121(num_classes=2)
    old = {
        key.replace("norm1", "norm.1").replace("conv2", "conv.2"): value
        for key, value in source.state_dict().items()
    }
    loaded = rotor.models.densenet121(weights=old, num_classes=2)
    assert list(loaded.state_dict()) == list(source.state_dict())


def test_relu_at_end_is_fused_and_keeps_the_keys():
    layer = nn.BatchNorm2d(3)
    fused = ReLUAtEnd(layer)
    assert list(fused.state_dict()) == list(layer.state_dict())
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(fused(x), copy.deepcopy(layer)(x).relu())
    net = nn.Sequential(ReLUAtEnd(nn.Linear(4, 4)), nn.Sequential(ReLUAtEnd(nn.Linear(4, 2))))
    assert list(net.state_dict()) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    other = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    net.load_state_dict(other.state_dict())
    other.load_state_dict(net.state_dict())
    assert torch.equal(net[0].module.weight, other[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({"0.weight": torch.zeros(4, 4)})


class TinyAuxiliary(nn.Module):
    """In the place of the auxiliary classifier, which needs images of full size."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(768, 7)

    def forward(self, x):
        return (x, self.fc(x.mean((2, 3)))) if self.training else x


@pytest.mark.slow
@pytest.mark.parametrize("family", ["resnet", "vgg_bn", "densenet", "inception"])
def test_models_train_bit_equal_below_their_plain_peak(family):
    make, shape = PAIRS[family]
    shape = (2, *shape[1:])
    twin = randomise(unset(make, rotor.models))
    if family == "inception":
        twin.AuxLogits = TinyAuxiliary()
    x = torch.randn(*shape)
    chk = Checkpointable(copy.deepcopy(twin), x, timer=one_millisecond)
    chk.compute_sequence(10**12)
    plain = chk.get_expected_memory()
    with pytest.raises(rotor.InfeasibleBudgetError) as caught:
        chk.compute_sequence(1)
    limit = (plain + caught.value.minimum_bytes) // 2
    chk.compute_sequence(limit, intervals=False)
    assert chk.schedule.forward_count > len(chk.chain)
    assert_trains_like(chk, twin, [torch.randn(*shape) for _ in range(2)], learning_rate=1e-6)
    if family == "inception":
        assert isinstance(chk(x), InceptionOutputs)
        return
    chk.zero_grad(set_to_none=False)
    assert peak_of(lambda: chk(x).sum().backward(), torch.device("cpu")) <= limit


def test_the_example_of_the_readme_in_small():
    """ResNet-18 below its plain peak: the limit holds, and gradients are those of a plain run."""
    net = rotor.models.resnet18()
    twin = copy.deepcopy(net)
    shape = (6, 3, 112, 112)
    net_check = Checkpointable(net)
    sample = torch.rand(*shape)
    net_check.measure(sample)
    net_check.compute_sequence(mem_limit=10**12)
    plain = net_check.get_expected_memory()
    limit = int(0.83 * plain)  # the share of the published example: 700 of 843 MB
    net_check.compute_sequence(mem_limit=limit)
    data = torch.rand(*shape)
    grads = []
    for module in (net_check, twin):
        x = data.clone().requires_grad_()
        module(x).sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(mine, his) for mine, his in zip(*grads, strict=True))
    net_check.zero_grad(set_to_none=False)
    measured = peak_of(lambda: net_check(data).sum().backward(), torch.device("cpu"))
    assert measured <= limit
    eager = peak_of(lambda: twin(data).sum().backward(), torch.device("cpu"))
    assert measured < eager


def test_import_needs_neither_torchvision_nor_ortools():
    code = (
        "import sys\n"
        "sys.modules['torchvision'] = None\n"
        "sys.modules['ortools'] = None\n"
        "import rotor\n"
        "rotor.models.resnet18(num_classes=2)\n"
        "print('ortools.sat' in sys.modules, rotor.vgg.VGG.__name__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False VGG", result.stderr
