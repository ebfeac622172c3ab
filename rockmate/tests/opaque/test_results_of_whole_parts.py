"""Results of modules that run whole: a tensor that is returned twice is one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rockmate import InfeasibleBudgetError, Rockmate, UnsupportedModuleError


class Twice(nn.Module):
    """Decides by a value, and returns a tensor in several places."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.made, self.calls = nn.Linear(8, 8), made, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.inner(x)
        if x.mean() > 100:
            return x, x.clone()
        return self.made(x / self.calls)


class Around(nn.Module):
    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.part = Twice(made)

    def forward(self, x: Tensor) -> Any:
        return self.part(torch.tanh(x))


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda x: (x, x),
    "in a list, too": lambda x: (x, [x, x]),
}


def outputs_of(found: Any) -> list[Tensor]:
    return [t for part in found for t in (part if isinstance(part, list) else [part])]


@pytest.mark.parametrize("kind", [Twice, Around])
@pytest.mark.parametrize("name", RESULTS)
def test_gradients_of_results_are_kept(kind: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    model = kind(RESULTS[name])
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8), 2**20)
    for _ in range(2):
        x = torch.randn(4, 8)
        both = [outputs_of(each(x)) for each in (planned, plain)]
        for outs in both:
            for out in outs:
                out.retain_grad()
            sum(n * out.square().mean() for n, out in enumerate(outs, 1)).backward()
        ours_are_one, theirs_are_one = ([a is outs[0] for a in outs] for outs in both)
        assert ours_are_one == theirs_are_one
        for ours, theirs in zip(*both, strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours.grad, theirs.grad)


def test_two_tensors_where_the_sample_had_one() -> None:
    torch.manual_seed(0)
    model = Around(RESULTS["twice"])
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8), 2**20)
    with torch.no_grad():
        for each in (model, plain):
            each.part.inner.bias.fill_(1e4)
    x = torch.randn(4, 8)
    with pytest.warns(RuntimeWarning, match="tensor 1, not tensor 0"):
        ours = planned(x)
    for one, other in zip(ours, plain(x), strict=True):
        assert torch.equal(one, other)


class Counted(nn.Module):
    """Decides by what it counts, and has statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.block0 = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.numbers, self.norm = iter(range(1, 1000)), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block0(x) * next(self.numbers)
        out: Tensor = self.norm(x)
        return out


def test_a_forward_whose_backward_comes_after_another_kind_of_call_is_planned() -> None:
    torch.manual_seed(0)
    model, plain = Counted(), Counted()
    plain.load_state_dict(model.state_dict())
    sample = torch.randn(64, 8)
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(model, sample, 0.01)
    planned = Rockmate(model, sample, error.value.minimum_bytes)
    x, other = torch.randn(64, 8), torch.randn(64, 8)
    for each in (planned, plain):
        waits = each(x)
        each(other.clone().requires_grad_()).square().mean().backward()
        waits.square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Hidden(nn.Module):
    """Decides by a value; its results are computed from one another, and it keeps its state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.state = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        self.state = 0.5 * self.state + h.mean(0)
        if h.mean() > 100:
            h = h * 0.5
        self.kept = h.sin()
        return self.last(self.kept + self.state).exp(), h


def hooked(out: Any, module: Any) -> list[Any]:
    out[1].register_hook(lambda g: g * 3)
    out[0].square().mean().backward(retain_graph=True)
    return []


def kept(out: Any, module: Any) -> list[Any]:
    out[1].retain_grad()
    module.kept.retain_grad()
    out[0].square().mean().backward(retain_graph=True)
    return [out[1].grad, module.kept.grad]


def asked(out: Any, module: Any) -> list[Any]:
    return [*torch.autograd.grad(out[0].sum(), [out[1], module.kept], retain_graph=True)]


def twice(out: Any, module: Any) -> list[Any]:
    (grad,) = torch.autograd.grad(out[0].sum(), out[1], create_graph=True)
    grad.square().sum().backward(retain_graph=True)
    return [grad]


@pytest.mark.parametrize("use", [hooked, kept, asked, twice])
def test_a_root_that_runs_whole_is_plain_pytorch(use: Callable[[Any, Any], list[Any]]) -> None:
    torch.manual_seed(0)
    model = Hidden()
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(4, 8), 2**20)
    assert planned.plan.opaque == ("",)
    for _ in range(2):  # the second goes back through the first
        x = torch.randn(4, 8)
        both = [use(each(x), each) for each in (planned, plain)]
        for ours, theirs in zip(*both, strict=True):
            assert torch.equal(ours, theirs)
    for each in (planned, plain):
        each(x)[0].sum().backward()
    assert_same_gradients(model, plain)


class Dependent(nn.Module):
    """Decides by a value; one of its results is computed of another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = 1.0 if x.mean().item() < 100 else 2.0
        made = x if self.kind == "an argument" else x * scale
        shown = made.view_as(made) if self.kind == "a view" else made
        return shown, made.sin() * scale


class Uses(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(8, 8), nn.Linear(8, 8), Dependent(kind)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.part(self.first(x))
        return first, self.last(second)


def _retained(first: Tensor) -> list[Tensor]:
    first.retain_grad()
    return []


def _hooked(first: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    first.register_hook(lambda grad: found.append(grad.clone()))
    return found


@pytest.mark.parametrize("kind", ["new", "an argument", "a view"])
def test_a_result_of_which_another_is_computed(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Uses(kind), torch.randn(4, 8)
    plain, planned = copy.deepcopy(model), Rockmate(model, x, 2**20)
    for each in (planned, plain):  # whoever does not ask for the gradient gets exact ones
        first, last = each(x)
        (first.mean() + last.square().mean()).backward()
    assert_same_gradients(model, plain)
    for asked in (_retained, _hooked):
        found = []
        for each in (planned, plain):
            first, last = each(x)
            seen = asked(first)
            loss = first.mean() + last.square().mean()
            if each is planned and kind == "new":
                with pytest.raises(UnsupportedModuleError, match="by a hook, retain_grad"):
                    loss.backward()
                return
            loss.backward()
            found.append([first.grad] if first.retains_grad else seen)
        assert all(map(torch.equal, *found))
    found = [torch.autograd.grad((f.mean() + s.mean()), f) for f, s in (planned(x), plain(x))]
    assert torch.equal(found[0][0], found[1][0])


class Shows(nn.Module):
    """Returns two results of such a part, alone or beside what is computed of them outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(8, 8), nn.Linear(8, 8), Dependent("new")
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = self.part(self.first(x))
        if self.kind == "alone":
            return first, second
        if self.kind == "with what is made of the second":
            return first, second, self.last(second)
        return first, self.last(second) + first


SHOWN = ["alone", "with what is made of the second", "with what is made of both"]


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("beside", ["", "a weight", "an input"])
def test_autograd_grad_between_results_of_a_whole_part(kind: str, beside: str) -> None:
    """None, a part or torch's own error would come where what is computed inside is left out."""
    model, x = Shows(kind), torch.randn(4, 8, requires_grad=True)
    planned = Rockmate(model, x.detach(), 2**20)
    more = {"": [], "a weight": [model.first.weight], "an input": [x]}[beside]
    for place in range(1, len(planned(x))):
        for unused in (False, True):
            found = planned(x)
            with pytest.raises(UnsupportedModuleError, match=r"torch\.autograd\.grad"):
                torch.autograd.grad(found[place].sum(), [found[0], *more], allow_unused=unused)
            edge = torch.autograd.graph.get_gradient_edge(found[0])
            with pytest.raises(UnsupportedModuleError, match=r"torch\.autograd\.grad"):
                torch.autograd.grad(found[place].sum(), [edge, *more], allow_unused=unused)


@pytest.mark.parametrize("kind", SHOWN)
def test_other_gradients_beside_such_results_are_exact(kind: str) -> None:
    torch.manual_seed(0)
    model = Shows(kind)
    plain, planned = copy.deepcopy(model), Rockmate(model, torch.randn(4, 8), 2**20)
    for _ in range(2):
        x, found = torch.randn(4, 8), []
        for each, own in ((planned, model), (plain, plain)):
            last = each(x)[-1]
            asked = [own.first.weight, own.first.bias]
            found.append(torch.autograd.grad(last.sum(), asked))
        assert all(map(torch.equal, *found))
        for each in (planned, plain):
            (sum(t.square().mean() for t in each(x))).backward()
        assert_same_gradients(model, plain)


def test_autograd_grad_of_a_result_of_which_another_is_computed() -> None:
    model, x = Uses("new"), torch.randn(4, 8)
    planned = Rockmate(model, x, 2**20)
    first, last = planned(x)
    with pytest.raises(UnsupportedModuleError, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(first.mean() + last.mean(), first)


class Turning(nn.Module):
    """Runs whole because it counts, and returns its third result otherwise than the others."""

    def __init__(self, otherwise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.otherwise, self.calls = otherwise, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.otherwise(x) if self.calls == 3 else x * 2


class BeforeAndBehind(nn.Module):
    """Writes to the result, and reads what it was made of."""

    def __init__(self, part: Turning) -> None:
        super().__init__()
        self.up, self.part, self.down = nn.Linear(8, 64), part, nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.up(x))
        found = self.part(hidden)
        found.mul_(0.5)
        return self.down(torch.tanh(found) + hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "otherwise", [lambda x: (x * 2).t().contiguous().t(), lambda x: x], ids=["layout", "memory"]
)
def test_results_that_lie_otherwise_are_plain_pytorchs(
    otherwise: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = BeforeAndBehind(Turning(otherwise))
    plain = copy.deepcopy(model)
    planned = Rockmate(model, torch.randn(32, 8), 2**20, cost="flops")
    for step in range(1, 5):
        x = torch.randn(32, 8)
        with pytest.warns(RuntimeWarning, match="runs plain") if step == 3 else nullcontext():
            ours = planned(x)
        theirs = plain(x)
        assert torch.equal(ours, theirs)
        for out in (ours, theirs):
            out.square().sum().backward()
        assert_same_gradients(model, plain)
