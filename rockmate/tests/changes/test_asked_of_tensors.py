"""What Python asks a tensor for beside its kind: as plain PyTorch answers, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rkgb import SideEffectError
from rockmate import Rockmate

ROOM_BYTES = 1_000_000  # more than any of these takes


class Asking(nn.Module):
    """It computes something else where a tensor answers otherwise."""

    def __init__(self, ask: Callable[[Tensor], float], *, is_whole: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.ask, self.is_whole = ask, is_whole

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.ask(x)
        if self.is_whole:
            x = x * (1 + random.random())
        return self.last(torch.tanh(self.first(x)))


def _wanting() -> Tensor:
    return torch.randn(6, 8, requires_grad=True)


def _with_gradient() -> Tensor:
    x = _wanting()
    x.grad = torch.ones(6, 8)
    return x


def _retaining() -> Tensor:
    x = _wanting() * 2
    x.retain_grad()
    return x


def _made_in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(6, 8)


def _written() -> Tensor:
    return torch.randn(6, 8).mul_(2)


def _marked(value: object) -> Tensor:
    x = torch.randn(6, 8)
    x.scale = value
    return x


def _scale_of(x: Tensor) -> float:
    found = getattr(x, "scale", 1.0)
    return float(found[0] if isinstance(found, list) else found)


# What is asked, an input that answers as most do, and one that does not.
ASKED: dict[str, tuple[Callable[[Tensor], float], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "leaf": (lambda x: 1.0 + x.is_leaf, _wanting, lambda: _wanting() * 2),
    "history": (lambda x: 1.0 + (x.grad_fn is None), _wanting, lambda: _wanting() * 2),
    "gradient": (lambda x: 1.0 + (x.is_leaf and x.grad is None), _wanting, _with_gradient),
    "retained": (lambda x: 1.0 + x.retains_grad, lambda: _wanting() * 2, _retaining),
    "view": (lambda x: 1.0 + (x._base is None), lambda: torch.randn(6, 8), lambda: _wanting()[:]),
    "version": (lambda x: 1.0 + x._version, lambda: torch.randn(6, 8), _written),
    "offset": (
        lambda x: 1.0 + x.storage_offset(),
        lambda: torch.randn(6, 8),
        lambda: torch.randn(7, 8)[1:],
    ),
    "inference": (
        lambda x: 1.0 + torch.is_inference(x),
        lambda: torch.randn(6, 8),
        _made_in_inference,
    ),
    "written on it": (_scale_of, lambda: torch.randn(6, 8), lambda: _marked(3.0)),
    "written in a list": (_scale_of, lambda: _marked([2.0]), lambda: _marked([3.0])),
}


# What only the user's own tensor can tell: refused where another one stands for it.
OF_THE_USERS = ("history", "gradient", "view")


@pytest.mark.parametrize("is_whole", [False, True], ids=["recorded", "whole"])
@pytest.mark.parametrize("name", ASKED)
def test_a_question_is_answered_as_in_plain_pytorch(name: str, is_whole: bool) -> None:
    """Each input is given first to a new plan, and then to one for the other; three times each."""
    ask, usual, unusual = ASKED[name]
    refused = contextlib.suppress(SideEffectError if is_whole or name in OF_THE_USERS else ())
    for makers in ((usual, unusual), (unusual, usual)):
        torch.manual_seed(1)
        inputs = [make() for make in makers for _ in range(3)]
        model = Asking(ask, is_whole=is_whole)
        twin = copy.deepcopy(model)
        with refused:
            planned = Rockmate(model, (inputs[0],), ROOM_BYTES)
            for step, x in enumerate(inputs):
                random.seed(step)
                found = planned(x)
                random.seed(step)
                assert torch.equal(found, twin(x))
                found.sum().backward()


class OfOwn(nn.Module):
    """It asks a parameter or a buffer of its own."""

    def __init__(self, ask: Callable[[OfOwn], bool]) -> None:
        super().__init__()
        self.first, self.ask = nn.Linear(8, 4), ask
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * (2.0 if self.ask(self) else 1.0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda own: own.first.weight.grad is not None,
        lambda own: own.first.weight._version > 1,
        lambda own: own.count._version > 1,
    ],
    ids=["gradient", "version of a parameter", "version of a buffer"],
)
def test_a_tensor_of_the_module_answers_as_in_plain_pytorch(ask: Callable[[OfOwn], bool]) -> None:
    torch.manual_seed(1)
    model, x = OfOwn(ask), torch.randn(6, 8)
    with contextlib.suppress(SideEffectError):
        planned = Rockmate(model, (x,), ROOM_BYTES)
        for _ in range(4):
            plain = x @ model.first.weight.T + model.first.bias
            expected = plain * (2.0 if ask(model) else 1.0)
            found = planned(x)
            assert torch.allclose(found, expected)
            found.sum().backward()
            with torch.no_grad():
                model.first.weight.sub_(0.01 * model.first.weight.grad)
                model.count.add_(1)


def test_hidden_tensors_answer_as_in_plain_pytorch() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.relu_()
            half = h[:, :4]
            return half * (1 + h._version + 2 * h.is_leaf + 4 * (half._base is None))

    torch.manual_seed(1)
    model, x = Hidden(), torch.randn(6, 8)
    assert torch.equal(Rockmate(model, (x,), ROOM_BYTES)(x), model(x))


def test_what_is_written_on_an_argument_is_written_or_refused() -> None:
    """A step that runs plain within the budget writes it; a planned one would not."""

    class Writing(nn.Module):
        def __init__(self, *, is_whole: bool) -> None:
            super().__init__()
            self.first, self.is_whole = nn.Linear(8, 8), is_whole

        def forward(self, x: Tensor) -> Tensor:
            x.seen = True
            return self.first(x) * (random.random() if self.is_whole else 1.0)

    for is_whole in (False, True):
        model, x = Writing(is_whole=is_whole), torch.randn(6, 8)
        with pytest.raises(SideEffectError, match="attribute 'seen' of a tensor"):
            Rockmate(model, (torch.randn(6, 8),), 0.5)
        random.seed(1)
        y = Rockmate(model, (torch.randn(6, 8),), ROOM_BYTES)(x)
        assert x.seen
        random.seed(1)
        assert torch.equal(y, model(x))


def test_a_tensor_written_on_an_argument_is_read_anew_or_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x * x.mask)

    torch.manual_seed(1)
    model, x = Masked(), torch.randn(6, 8)
    x.mask = torch.ones(6, 1)
    with contextlib.suppress(SideEffectError):
        planned = Rockmate(model, (x,), ROOM_BYTES)
        for step in range(3):
            x.mask = torch.full((6, 1), float(step))
            found = planned(x)
            assert torch.equal(found, model(x))
            found.sum().backward()


KEPT = {"tensor": torch.ones(4)}


class Keeps(nn.Module):
    """It asks a tensor that is no parameter and no buffer."""

    def __init__(self, ask: Callable[[Tensor], float], *, is_own: bool) -> None:
        super().__init__()
        self.layer, self.ask, self.is_own = nn.Linear(8, 4), ask, is_own
        self.kept = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.ask(self.kept if self.is_own else KEPT["tensor"])


@pytest.mark.parametrize("is_own", [True, False], ids=["attribute", "global"])
@pytest.mark.parametrize("what", ["written", "version", "gradient"])
def test_kept_tensors_answer_as_in_plain_pytorch(what: str, is_own: bool) -> None:
    ask: dict[str, Callable[[Tensor], float]] = {
        "written": lambda t: getattr(t, "scale", 1.0),
        "version": lambda t: 1.0 + t._version,
        "gradient": lambda t: 1.0 + (t.grad is None),
    }
    torch.manual_seed(1)
    KEPT["tensor"] = torch.ones(4)
    model, x = Keeps(ask[what], is_own=is_own), torch.randn(6, 8)
    kept = model.kept if is_own else KEPT["tensor"]
    with contextlib.suppress(SideEffectError):
        planned = Rockmate(model, (x,), ROOM_BYTES)
        for step in range(4):
            if step == 2 and what == "written":
                kept.scale = 3.0
            elif step == 2 and what == "version":
                kept.mul_(1.0)
            elif step == 2:
                kept.grad = torch.ones(4)
            found = planned(x)
            assert torch.equal(found, model(x))
            found.sum().backward()


class Whole(nn.Module):
    """A part that runs whole; what it returns was made in one of several ways."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(8, 8), made

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.layer(x) * (1 + random.random()) if random.random() < 2 else x)


def _hooked(x: Tensor) -> Tensor:
    part = nn.Identity()
    part.register_full_backward_hook(lambda _module, gradients, _outputs: (gradients[0] * 0.5,))
    result: Tensor = part(x)
    return result


RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "new": lambda x: x * 2,
    "view": lambda x: x.view(-1).view(x.shape),
    "written": lambda x: x.mul_(2).add_(1),
    "second of two": lambda x: (x * 2).split(4, dim=1)[1].repeat(1, 2),
    "part": lambda x: torch.cat([x, x], 1).split(8, dim=1)[1],
    "hooked": _hooked,
}
ASKED_OF_RESULTS: dict[str, Callable[[Tensor], float]] = {
    "version": lambda x: 1.0 + x._version,
    "base": lambda x: 1.0 + (x._base is None),
    "view": lambda x: 1.0 + x._is_view(),
    "number": lambda x: 1.0 + x.output_nr,
    "written later": lambda x: 1.0 + x.clone().mul_(2)._version + x.mul_(2)._version,
}


class AskingResults(nn.Module):
    def __init__(self, made: Callable[[Tensor], Tensor], ask: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.whole, self.last, self.ask = Whole(made), nn.Linear(8, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        x = self.whole(x)
        return self.last(x * self.ask(x))


# Plain PyTorch refuses to write to a view that was made with others, or in a Function.
CASES = [
    (made, ask)
    for made in RESULTS
    for ask in ASKED_OF_RESULTS
    if ask != "written later" or made not in ("part", "hooked")
]


def _check_two_steps(net: nn.Module, x: Tensor) -> None:
    twin = copy.deepcopy(net)
    planned = Rockmate(net, x, ROOM_BYTES, cost="flops", self_test=False)
    for seed in range(2):
        random.seed(seed)
        expected = twin(x)
        random.seed(seed)
        ours = planned(x)
        assert torch.equal(ours, expected)
        (ours.sum() + expected.sum()).backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize(("made", "ask"), CASES)
def test_results_of_parts_that_run_whole_answer_as_they_were_made(made: str, ask: str) -> None:
    net, x = AskingResults(RESULTS[made], ASKED_OF_RESULTS[ask]), torch.randn(6, 8)
    _check_two_steps(net, x)


MADE_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: functional.leaky_relu(x + 0, 0.1, inplace=True),
    "in a view": lambda x: x.view(-1).mul_(2).view(6, 8),
    "second of two": lambda x: (x * 2).split(4, dim=1)[1].repeat(1, 2),
    "new": lambda x: x * 2,
}


class AskingInside(nn.Module):
    """A part that runs whole asks for how its input was made."""

    def __init__(self, made: Callable[[Tensor], Tensor], ask: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.first, self.made, self.whole = nn.Linear(8, 8), made, Whole(lambda x: x)
        self.whole.layer = Asked(ask)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.made(self.first(x)))


class Asked(nn.Module):
    def __init__(self, ask: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ask(x)


@pytest.mark.parametrize("ask", [ask for ask in ASKED_OF_RESULTS if ask != "written later"])
@pytest.mark.parametrize("made", MADE_BEFORE)
def test_parts_that_run_whole_ask_for_how_their_inputs_were_made(made: str, ask: str) -> None:
    net, x = AskingInside(MADE_BEFORE[made], ASKED_OF_RESULTS[ask]), torch.randn(6, 8)
    _check_two_steps(net, x)
