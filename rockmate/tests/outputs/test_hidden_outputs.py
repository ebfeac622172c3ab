"""Outputs that others were computed from: looked at, hooked and trained on as in plain PyTorch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import Rockmate, UnsupportedModuleError

WIDTH, ROWS = 24, 48


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        yield


class Two(nn.Module):
    """A hidden state and a result; `uses` says how often the result uses it."""

    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses = uses

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        y = self.second(h)
        if self.uses > 1:
            y = y * h
        if self.uses > 2:
            y = y + h.exp()
        return y, h


class Pooled(nn.Module):
    """The gradient of the hidden state is an expanded number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.second(h.mean(0)), h


class Skipping(nn.Module):
    """Part of the result goes by another way than by the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.third(x)
        h = torch.tanh(self.first(z))
        return self.second(h) * torch.sigmoid(z), h


class Layers(nn.Module):
    """All hidden states, as a tuple beside the result and the loss."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        h, states = x, []
        for layer in self.layers:
            h = h + self.drop(torch.relu(layer(h)))
            states.append(h)
        logits = self.head(h)
        return logits.logsumexp(-1).mean(), logits, tuple(states)


class Viewed(nn.Module):
    """The hidden state is a view, the result of another view of its memory, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        both = self.first(x)
        h, other = both.chunk(2, dim=1)
        turned = h.t()
        return self.second(turned.t()).relu() + other, h, turned, h


class WrittenLater(nn.Module):
    """The hidden state is written in place once the result was computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        y = self.second(h.relu())
        return y, h.add_(1)


class Branches(nn.Module):
    """Two results; the hidden state is in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.third(x)
        h = torch.tanh(self.first(z))
        return self.second(h), h, z.sigmoid()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "one use": Two,
    "two uses": lambda: Two(2),
    "three uses": lambda: Two(3),
    "pooled": Pooled,
    "skipping": Skipping,
    "layers": Layers,
    "views": Viewed,
    "written later": WrittenLater,
    "branches": Branches,
}


def flat(result: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for part in result:
        found += part if isinstance(part, tuple) else [part]
    return found


Loop = Callable[[nn.Module, list[Tensor]], list[Any]]


def result_alone(module: nn.Module, out: list[Tensor]) -> list[Any]:
    out[0].square().sum().backward()
    return []


def all_together(module: nn.Module, out: list[Tensor]) -> list[Any]:
    loss: Any = sum((t * (i + 1)).square().sum() for i, t in enumerate(out))
    loss.backward()
    return []


def hidden_alone(module: nn.Module, out: list[Tensor]) -> list[Any]:
    out[1].square().sum().backward()
    return []


def retained(module: nn.Module, out: list[Tensor]) -> list[Any]:
    for tensor in out:
        tensor.retain_grad()
    out[0].square().sum().backward()
    return [t.grad for t in out]


def retained_with_more(module: nn.Module, out: list[Tensor]) -> list[Any]:
    for tensor in out:
        tensor.retain_grad()
    (out[0].square().sum() + out[1].exp().sum() + out[1].sin().sum()).backward()
    return [t.grad for t in out]


def hooks_that_look(module: nn.Module, out: list[Tensor]) -> list[Any]:
    seen: list[Any] = []
    for place, tensor in enumerate(out):
        tensor.register_hook(lambda g, place=place: seen.append((place, g)))
    out[0].square().sum().backward()
    return [part for pair in seen for part in (torch.tensor(pair[0]), pair[1])]


def hooks_that_change(module: nn.Module, out: list[Tensor]) -> list[Any]:
    out[1].register_hook(lambda g: g * 3)
    out[1].register_hook(lambda g: g.flip(0))
    (out[0].sum() + out[1].sum()).backward()
    return []


def grad_of_hidden(module: nn.Module, out: list[Tensor]) -> list[Any]:
    return list(torch.autograd.grad(out[0].square().sum(), out[1], allow_unused=True))


def grad_of_some(module: nn.Module, out: list[Tensor]) -> list[Any]:
    wanted = [*out[1:], *module.parameters()]
    return list(torch.autograd.grad(out[0].square().sum(), wanted, allow_unused=True))


def grad_then_more(module: nn.Module, out: list[Tensor]) -> list[Any]:
    loss = out[0].square().sum()
    found = torch.autograd.grad(loss, out[1], retain_graph=True, allow_unused=True)
    loss.backward()
    return list(found)


def hidden_first(module: nn.Module, out: list[Tensor]) -> list[Any]:
    out[1].square().sum().backward(retain_graph=True)
    out[0].square().sum().backward()
    return []


def only_into_hidden(module: nn.Module, out: list[Tensor]) -> list[Any]:
    out[1].retain_grad()
    out[0].square().sum().backward(inputs=[out[1]])
    return [out[1].grad]


def detached(module: nn.Module, out: list[Tensor]) -> list[Any]:
    result, _ = flat(module(out[1].detach()))[:2]
    (result.sum() + out[0].sum()).backward()
    return []


def carried_on(module: nn.Module, out: list[Tensor]) -> list[Any]:
    result = flat(module(out[1]))[0]
    (result.square().sum() + out[0].sum()).backward()
    return []


def scaled_by_its_norm(module: nn.Module, out: list[Tensor]) -> list[Any]:
    """Losses weighed by the norms of their gradients at the hidden state, as GradNorm does."""
    losses = out[0].square().mean(), out[0].abs().mean()
    norms = [torch.autograd.grad(loss, out[1], retain_graph=True)[0].norm() for loss in losses]
    (losses[0] / norms[0] + losses[1] / norms[1]).backward()
    return norms


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        *(result_alone, all_together, hidden_alone, retained, retained_with_more),
        *(hooks_that_look, hooks_that_change, grad_of_hidden, grad_of_some, grad_then_more),
        *(hidden_first, only_into_hidden, detached, carried_on, scaled_by_its_norm),
    )
}


def run(
    module: Any, loops: list[Loop], plain: Any, steps: int = 3, inputs: bool = True
) -> Iterator[list[Any]]:
    """Yield what each step gives: the outputs, what its loop finds, and all gradients."""
    source = torch.Generator().manual_seed(3)
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=source).requires_grad_(inputs and step % 2 == 1)
        torch.manual_seed(step)
        out = flat(module(x))
        kept = [t.detach().clone() for t in out]
        found = loops[step % len(loops)](module, out)
        yield [*kept, *found, *(p.grad for p in plain.parameters()), x.grad]
        for parameter in plain.parameters():
            parameter.grad = None


def assert_same(ours: list[Any], theirs: list[Any], where: str) -> None:
    assert len(ours) == len(theirs)
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (other is None), f"{where}: {place} is there on one side"
        if mine is not None:
            assert mine.stride() == other.stride() or mine.numel() < 2, f"{where}: {place} lies"
            assert torch.equal(mine, other), f"{where}: {place} differs"


def is_possible(name: str, loop: str) -> bool:
    """Whether plain PyTorch can do it: what is not connected has no gradient to norm."""
    away = ("written later",)
    if name == "views" and loop in ("scaled_by_its_norm",):
        return False
    if name in away and loop in ("scaled_by_its_norm", "only_into_hidden"):
        return False
    if name == "pooled" and loop == "carried_on":  # the sample has a gradient then: needs more
        return False
    return not (name == "layers" and loop in ("detached", "carried_on"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", [1.0, "1MiB"])
@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_used_as_in_plain_pytorch(name: str, budget: Any) -> None:
    """All loops in turn, so that those that ask for nothing come before and after the others."""
    torch.manual_seed(0)
    module = MODULES[name]()
    twin = copy.deepcopy(module)
    inputs = budget != 1.0  # whose gradients need more than a step without them
    if name == "layers" and budget == 1.0:  # of a step from the loss alone: others need more
        budget = "96KiB"
    wrapped = Rockmate(module, torch.randn(ROWS, WIDTH), budget)
    names = [loop for loop in LOOPS if is_possible(name, loop)]
    names += names[::-2]
    loops = [LOOPS[loop] for loop in names]
    mine = run(wrapped, loops, module, len(loops), inputs)
    theirs = run(twin, loops, twin, len(loops), inputs)
    for loop, found, expected in zip(names, mine, theirs, strict=True):
        assert_same(found, expected, loop)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["three uses", "skipping", "layers", "branches"])
def test_what_is_asked_for_first_is_as_in_plain_pytorch(name: str) -> None:
    """Nothing of an earlier step has shown that a hidden state is looked at."""
    sample = torch.randn(ROWS, WIDTH)
    for loop in filter(functools.partial(is_possible, name), LOOPS):
        torch.manual_seed(0)
        module = MODULES[name]()
        twin = copy.deepcopy(module)
        wrapped = Rockmate(module, sample, "1MiB", cost="flops", self_test=False)
        mine = run(wrapped, [LOOPS[loop]], module, 2)
        theirs = run(twin, [LOOPS[loop]], twin, 2)
        for step, (found, expected) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(found, expected, f"{loop}, step {step}")


class Normed(nn.Module):
    """Its second weight is made in the forward, and is an output as well: an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return self.second(hidden), hidden


def test_a_hook_that_comes_late_gets_a_gradient_or_the_step_is_refused() -> None:
    torch.manual_seed(0)
    model, sample = Normed(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    planned = Rockmate(model, (sample,), 1.0, cost="flops", cache=False, progress=False)
    seen = []

    def step(module: nn.Module) -> Tensor:
        result, hidden = module(sample)
        hidden.register_hook(seen.append)
        result.square().sum().backward()
        return seen.pop()

    with pytest.raises(UnsupportedModuleError, match="Run the step again"):
        step(planned)
    assert seen == []
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    assert torch.equal(step(planned), step(plain))
    assert all(map(torch.equal, _gradients(model), _gradients(plain)))


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]
