"""Operations that raise an error for some values: plain PyTorch's error, or its way around it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oracles.training import assert_same_gradients
from rkgb.engine import Sample, record
from rockmate import Rockmate
from runs.planned import wrap

N = 12


class Solves(nn.Module):
    """Random numbers and running means before an operation on a square matrix."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(N, N), nn.BatchNorm1d(N)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.norm(self.linear(x)), 0.1)
        return self.operation(y, x) + y.mean()


def caught(y: Tensor, x: Tensor) -> Tensor:
    """Add more to the diagonal until the matrix is positive definite."""
    for jitter in (0.0, 1e3):
        try:
            return torch.linalg.cholesky(x.T @ x + y * 1e-3 + jitter * torch.eye(N)) @ y
        except torch.linalg.LinAlgError:
            continue
    raise RuntimeError("never")


def caught_in_kernel(y: Tensor, x: Tensor) -> Tensor:
    try:
        return torch.linalg.eigh(y.T @ y + x)[0] * y
    except RuntimeError:
        return y * 2


def caught_index(y: Tensor, x: Tensor) -> Tensor:
    rows = x[:, 0].abs().long()
    try:
        return y.index_select(0, rows)
    except IndexError:
        return y


def never_caught(y: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.inv(x) @ y


def asserted(y: Tensor, x: Tensor) -> Tensor:
    torch._assert_async(x.isfinite().all())
    return y.nan_to_num()


def good_and_bad(operation: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    good = torch.eye(N) + torch.rand(N, N) * 0.1
    bad = {
        caught: torch.zeros(N, N),
        caught_in_kernel: torch.full((N, N), torch.nan),
        caught_index: torch.full((N, N), 50.0),
        never_caught: torch.zeros(N, N),
        asserted: torch.full((N, N), torch.inf),
    }[operation]
    return [good, bad, good * 2, bad, *[bad] * 3, good]  # more than what is looked at twice


@pytest.mark.filterwarnings("ignore:.*This step runs plain:RuntimeWarning")
@pytest.mark.parametrize(
    ("operation", "first"),
    [
        *((o, 0) for o in (caught, caught_in_kernel, caught_index, never_caught, asserted)),
        *((o, 1) for o in (caught, caught_in_kernel, caught_index)),
    ],
)
def test_errors_come_and_are_caught_as_in_plain_pytorch(
    operation: Callable[[Tensor, Tensor], Tensor], first: int
) -> None:
    batches = good_and_bad(operation)[first:]
    torch.manual_seed(0)
    model = Solves(operation)
    twin = copy.deepcopy(model)
    rk = wrap(model, batches[0], "1MiB")
    for batch in batches:
        seen = []
        for module in (twin, rk):
            torch.manual_seed(2)
            module.zero_grad()
            try:
                y = module(batch)
                y.square().mean().backward()
                seen.append(y.detach())
            except RuntimeError as error:
                seen.append(f"{type(error).__name__}: {error}")
            seen.append(torch.get_rng_state())
        ours, theirs = seen[2:], seen[:2]
        assert type(ours[0]) is type(theirs[0])
        if isinstance(ours[0], Tensor):
            torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
            if not theirs[0].isnan().any():
                assert_same_gradients(twin, model)
        else:
            assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
        for (name, own), other in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.allclose(own, other, rtol=0, atol=0, equal_nan=True), name


FACTORED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "solve": lambda w, x: torch.linalg.solve(w, torch.linalg.solve(w.tanh(), x.T)),
    "determinants": lambda w, x: x * torch.slogdet(w)[1] + torch.linalg.det(w),
    "factors": lambda w, x: torch.linalg.lu(w)[1] @ x.T,
    "pivots": lambda w, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(w), x.T),
}


class Factors(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(N, N)), kind

    def forward(self, x: Tensor) -> Tensor:
        return FACTORED[self.kind](self.weight, x)


@pytest.mark.parametrize("cost", ["flops", "measured"])
@pytest.mark.parametrize("kind", FACTORED)
def test_factorised_matrices_train_bit_by_bit_within_the_plain_peak(kind: str, cost: str) -> None:
    torch.manual_seed(0)
    model = Factors(kind)
    twin, x = copy.deepcopy(model), torch.randn(N, N)
    rk = Rockmate(model, x, 1.0, cost=cost, progress=False, cache=False)
    for _ in range(2):
        for module in (twin, rk):
            module(x).square().sum().backward()
        assert_same_gradients(twin, model)


class Catches(nn.Module):
    """Catches whatever is raised, by some block, and decides by a value in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        try:
            if y.sum() > 0:
                return y * 2
            return torch.addmm(y, x, x[:, :2])
        except Exception:
            return y * 7


def test_a_forward_that_catches_all_errors_catches_none_of_a_recording() -> None:
    torch.manual_seed(0)
    model = Catches()
    twin, batches = copy.deepcopy(model), [torch.randn(N, N) * (-1) ** i for i in range(4)]
    rk = wrap(model, batches[0], "1MiB")
    for x in batches:
        for module in (twin, rk):
            module.zero_grad()
            module(x).square().sum().backward()
        assert torch.equal(rk(x), twin(x))
        assert_same_gradients(twin, model)


def asks(y: Tensor) -> int:
    """Run no operation, as where libraries ask for what is installed."""
    try:
        return len(y.shape) // 2
    except Exception:
        return 2


def beside_all(y: Tensor, x: Tensor) -> Tensor:
    return y @ x.T * asks(y)


@pytest.mark.parametrize(("operation", "catches"), [(caught_in_kernel, True), (beside_all, False)])
def test_only_an_operation_inside_counts_as_caught(
    operation: Callable[[Tensor, Tensor], Tensor], *, catches: bool
) -> None:
    """Steps that may be caught keep what a plain run would start from."""
    net, x = Solves(operation), torch.randn(N, N)
    assert record(net, Sample.of(net, (x,), {})).catches == catches
