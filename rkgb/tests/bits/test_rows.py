"""Rules of pieces against the operations themselves, on random numbers; and what has no rule.

Pieces that add up are rounded otherwise than the whole: sums of float64 agree to 1e-12. All that is
cut along rows is compared bit by bit where kernels treat each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo, same_values
from rkgb.errors import NotByPiecesError
from rkgb.rows.call import InPieces
from rkgb.rows.cuts import EVEN, Runs, piece_of, piece_shape, reshaped, spread_from
from rkgb.rows.pieces import Cutting

aten = torch.ops.aten
Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[int, tuple[int, ...]]]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def log_probabilities() -> Tensor:
    return torch.log_softmax(rows(8, 5), 1)


def targets() -> Tensor:
    return torch.tensor([0, 1, -100, 3, 4, -100, 2, 1])


def places(count: int) -> Tensor:
    return torch.ones(count, 1, dtype=torch.int64)


def normed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight = rows(8, 5), rows(5)
    _, mean, rstd = torch.native_layer_norm(x, [5], weight, weight, 1e-5)
    return x, weight, mean, rstd


def layer_norm_backward() -> tuple[Any, ...]:
    x, weight, mean, rstd = normed()
    return rows(8, 5), x, [5], mean, rstd, weight, weight, [True, True, True]


def images(*, channels: int = 4) -> Tensor:
    return rows(8, channels, 6, 6)


def pooled() -> tuple[Any, ...]:
    x = images()
    out, indices = aten.max_pool2d_with_indices(x, [2, 2])
    return torch.randn_like(out), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


def group_normed() -> tuple[Any, ...]:
    x, weight = images(), rows(4)
    _, mean, rstd = aten.native_group_norm(x, weight, weight, 8, 4, 36, 2, 1e-5)
    return images(), x, mean, rstd, weight, 8, 4, 36, 2, [True, True, True]


def attended() -> tuple[Any, ...]:
    q, k, v = rows(8, 8, 5, 2), rows(8, 8, 5, 2), rows(8, 8, 5, 2)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return rows(8, 8, 5, 2), q, k, v, out, sums, 0.0, True


def convolved(*, transposed: bool = False) -> tuple[Any, ...]:
    weight = rows(4, 4, 3, 3)
    return images(), weight, rows(4), [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1


def convolved_backward() -> tuple[Any, ...]:
    x, weight, _, *how = convolved()
    return images(), x, weight, [4], *how, [True, True, True]


BY_IMAGES = (4, 1, 1, 1)
CASES: dict[str, Case] = {
    "scatter_add": (
        aten.scatter_add.default,
        lambda: (rows(8, 5), 1, torch.arange(8).view(8, 1) % 5, rows(8, 1)),
        {0: (4, 1)},
    ),
    "convolution": (aten.convolution.default, convolved, {0: BY_IMAGES}),
    "transposed convolution": (
        aten.convolution.default,
        lambda: convolved(transposed=True),
        {0: BY_IMAGES},
    ),
    "convolution backward": (
        aten.convolution_backward.default,
        convolved_backward,
        {0: BY_IMAGES, 1: BY_IMAGES},
    ),
    "max_pool2d": (
        aten.max_pool2d_with_indices.default,
        lambda: (images(), [2, 2]),
        {0: BY_IMAGES},
    ),
    "max_pool2d backward": (aten.max_pool2d_with_indices_backward.default, pooled, {1: BY_IMAGES}),
    "avg_pool2d": (aten.avg_pool2d.default, lambda: (images(), [2, 2]), {0: BY_IMAGES}),
    "adaptive pooling": (
        aten._adaptive_avg_pool2d_backward.default,
        lambda: (rows(8, 4, 3, 3), images()),
        {0: BY_IMAGES},
    ),
    "upsampling": (
        aten.upsample_nearest2d.vec,
        lambda: (images(), None, [2.0, 2.0]),
        {0: BY_IMAGES},
    ),
    "upsampling backward": (
        aten.upsample_bilinear2d_backward.default,
        lambda: (rows(8, 4, 12, 12), [12, 12], [8, 4, 6, 6], False),
        {0: BY_IMAGES},
    ),
    "group_norm": (
        aten.native_group_norm.default,
        lambda: (images(), rows(4), rows(4), 8, 4, 36, 2, 1e-5),
        {0: BY_IMAGES},
    ),
    "group_norm backward": (aten.native_group_norm_backward.default, group_normed, {1: BY_IMAGES}),
    "embedding": (
        aten.embedding.default,
        lambda: (rows(9, 3), torch.arange(16).view(2, 8) % 9),
        {1: (2, 2)},
    ),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        lambda: (rows(8, 3), torch.arange(8) % 3, 9, -1, False),
        {1: (4,)},
    ),
    "attention by heads": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        lambda: (*attended()[1:4], 0.0, True),
        {0: (2, 2, 1, 1)},
    ),
    "attention backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        attended,
        {1: (4, 1, 1, 1)},
    ),
    "cat": (aten.cat.default, lambda: ([rows(8, 3), rows(8, 2)], -1), {0: (4, 1)}),
    "split": (aten.split.Tensor, lambda: (rows(8, 6), 4, 1), {0: (4, 1)}),
    "select": (aten.select.int, lambda: (rows(8, 6), 1, 2), {0: (4, 1)}),
    "unbind": (aten.unbind.int, lambda: (rows(3, 8), 0), {0: (1, 4)}),
    "select backward": (aten.select_backward.default, lambda: (rows(8), [8, 6], 1, 2), {0: (4,)}),
    "slice backward": (
        aten.slice_backward.default,
        lambda: (rows(8, 2), [8, 6], 1, 1, 3, 1),
        {0: (4, 1)},
    ),
    "add": (aten.add.Tensor, lambda: (rows(8, 3), rows(3)), {0: (4, 1)}),
    "add of a row for all": (aten.add.Tensor, lambda: (rows(8, 3), rows(1, 3)), {0: (4, 1)}),
    "mul of two cut ones": (
        aten.mul.Tensor,
        lambda: (rows(8, 3), rows(8, 1)),
        {0: (4, 1), 1: (4, 1)},
    ),
    "gelu": (aten.gelu.default, lambda: (rows(2, 8, 3),), {0: (2, 2, 1)}),
    "gelu_backward": (aten.gelu_backward.default, lambda: (rows(8, 3), rows(8, 3)), {1: (4, 1)}),
    "where": (aten.where.self, lambda: (rows(8, 3) > 0, rows(8, 3), rows(8, 3)), {0: (4, 1)}),
    "view": (aten.view.default, lambda: (rows(2, 8, 3), [16, 3]), {0: (2, 2, 1)}),
    "view of flat rows": (aten.view.default, lambda: (rows(8, 6), [2, 4, 6]), {0: (4, 1)}),
    "transpose": (aten.transpose.int, lambda: (rows(8, 6, 3), 0, -1), {0: (4, 1, 1)}),
    "expand": (aten.expand.default, lambda: (rows(8, 1), [8, 5]), {0: (4, 1)}),
    "slice": (aten.slice.Tensor, lambda: (rows(8, 5), 1, 1, 3), {0: (4, 1)}),
    "mm by rows": (aten.mm.default, lambda: (rows(8, 3), rows(3, 5)), {0: (4, 1)}),
    "mm by columns": (aten.mm.default, lambda: (rows(8, 3), rows(3, 8)), {1: (1, 4)}),
    "mm that adds up": (aten.mm.default, lambda: (rows(3, 8), rows(8, 5)), {0: (1, 4)}),
    "mm that adds up, both": (
        aten.mm.default,
        lambda: (rows(3, 8), rows(8, 5)),
        {0: (1, 4), 1: (4, 1)},
    ),
    "mm, the second": (aten.mm.default, lambda: (rows(3, 8), rows(8, 5)), {1: (4, 1)}),
    "addmm": (aten.addmm.default, lambda: (rows(5), rows(8, 3), rows(3, 5)), {1: (4, 1)}),
    "addmm by columns": (
        aten.addmm.default,
        lambda: (rows(8), rows(8, 3), rows(3, 8)),
        {2: (1, 4)},
    ),
    "bmm by batch": (aten.bmm.default, lambda: (rows(8, 3, 5), rows(8, 5, 2)), {0: (4, 1, 1)}),
    "bmm by rows": (aten.bmm.default, lambda: (rows(2, 8, 5), rows(2, 5, 3)), {0: (1, 4, 1)}),
    "bmm that adds up": (aten.bmm.default, lambda: (rows(2, 3, 8), rows(2, 8, 3)), {1: (1, 4, 1)}),
    "sum over rows": (aten.sum.dim_IntList, lambda: (rows(8, 3), [0], True), {0: (4, 1)}),
    "sum over columns": (aten.sum.dim_IntList, lambda: (rows(8, 3), [1]), {0: (4, 1)}),
    "sum": (aten.sum.default, lambda: (rows(8, 3),), {0: (4, 1)}),
    "mean": (aten.mean.default, lambda: (rows(8, 3),), {0: (4, 1)}),
    "mean over columns": (aten.mean.dim, lambda: (rows(8, 3), [-1], True), {0: (4, 1)}),
    "softmax": (aten._softmax.default, lambda: (rows(8, 5), -1, False), {0: (4, 1)}),
    "log_softmax backward": (
        aten._log_softmax_backward_data.default,
        lambda: (rows(8, 5), log_probabilities(), 1, torch.float64),
        {1: (4, 1)},
    ),
    "layer_norm": (
        aten.native_layer_norm.default,
        lambda: (rows(8, 5), [5], rows(5), None, 1e-5),
        {0: (4, 1)},
    ),
    "layer_norm backward": (
        aten.native_layer_norm_backward.default,
        layer_norm_backward,
        {1: (4, 1)},
    ),
    "nll_loss": (
        aten.nll_loss_forward.default,
        lambda: (log_probabilities(), targets(), None, 1, -100),
        {0: (4, 1)},
    ),
    "nll_loss with weights": (
        aten.nll_loss_forward.default,
        lambda: (log_probabilities(), targets(), rows(5).abs(), 1, -100),
        {0: (4, 1)},
    ),
    "nll_loss of each": (
        aten.nll_loss_forward.default,
        lambda: (log_probabilities(), targets(), None, 0, -100),
        {1: (4,)},
    ),
    "nll_loss backward": (
        aten.nll_loss_backward.default,
        lambda: (
            *(rows(1)[0], log_probabilities(), targets(), None, 1, -100),
            torch.tensor(6.0, dtype=torch.float64),
        ),
        {1: (4, 1)},
    ),
}


def laid_out(
    target: Any,
    args: tuple[Any, ...],
    cuts: dict[int, tuple[int, ...]],
    runs: Runs = EVEN,
    same_bits: Any = None,
) -> tuple[Cutting, InPieces, dict[str, Tensor], list[Tensor]]:
    """Return an operation in pieces, what it takes by name, and what it makes as a whole."""
    given: dict[str, Tensor] = {}

    def named(tree: Any, name: str) -> Any:
        if isinstance(tree, list):
            return [named(part, name + "'" * place) for place, part in enumerate(tree)]
        if not isinstance(tree, Tensor):
            return tree
        given[name] = tree
        return Ref(name)

    recorded = tuple(named(arg, f"in_{place}") for place, arg in enumerate(args))
    expected = target(*args)
    made = [expected] if isinstance(expected, Tensor) else list(expected)
    names = [f"out_{place}" for place in range(len(made))]
    # Results as kernels of their own would make them.
    values = {**given, **dict(zip(names, (m.contiguous().clone() for m in made), strict=True))}
    infos = {
        name: TensorInfo.of(value, name, value.numel() * value.element_size())
        for name, value in values.items()
    }
    op = Op(
        name=names[0],
        target=target,
        args=recorded,
        kwargs={},
        results=tuple(names),
        returns_many=not isinstance(expected, Tensor),
    )
    seeds = {f"in_{place}": cut for place, cut in cuts.items()}
    cutting = Cutting(infos, math.prod(next(iter(cuts.values()))), seeds, runs, same_bits)
    cutting.add(op)
    return cutting, InPieces(cutting.pieces(names), "op", "forward"), given, made


def in_threes(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Return cuts with three parts in the last dimension that is cut."""
    last = max(dim for dim, parts in enumerate(cuts) if parts > 1)
    return (*cuts[:last], 3, *cuts[last + 1 :])


# Some in which a result takes the memory of an argument.
LENDING = ("convolution backward", "layer_norm backward", "gelu_backward", "attention backward")
EACH = [(name, EVEN) for name in CASES]
EACH += [(name, Runs(8, 3)) for name in CASES if name != "view of flat rows"]  # are no boxes then


@pytest.mark.parametrize(("name", "runs"), EACH)
def test_pieces_make_the_whole(name: str, runs: Runs) -> None:
    """Whatever rows are cut, the results are those of the operation on the whole."""
    torch.manual_seed(0)
    target, make, cuts = CASES[name]
    if runs != EVEN:  # 3 + 3 + 2 of 8 rows
        cuts = {place: in_threes(cut) for place, cut in cuts.items()}
    cutting, call, given, expected = laid_out(target, make(), cuts, runs)
    assert cutting.loop, "it must run on pieces"
    found = call(*(given[taken] for taken in call.pieces.takes))
    assert len(found) == len(expected)
    places = frozenset(range(len(call.pieces.takes)))
    donated = call.freeing(places, places)
    own = [given[taken].clone() for taken in call.pieces.takes]
    lent = {own[call.pieces.takes.index(taken)].data_ptr() for taken in donated.lent.values()}
    again = donated.run(own)
    assert lent <= {tensor.data_ptr() for tensor in again}
    assert lent or name not in LENDING
    assert all(map(same_values, found, again)), "what is written over was still read"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_short_types_are_rounded_once(dtype: torch.dtype) -> None:
    """Adding 4096 rows up in the type itself would stop at 256."""
    ones = torch.ones(4096, 2, dtype=dtype)
    args, cuts = (ones, [0]), {0: (2048, 1)}
    _, call, given, (expected,) = laid_out(aten.sum.dim_IntList, args, cuts)
    (found,) = call(*(given[taken] for taken in call.pieces.takes))
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("target", "args", "cuts"),
    [
        (aten._softmax.default, (rows(8, 4), 1, False), {0: (1, 4)}),  # over what is cut
        (aten.native_layer_norm.default, (rows(8, 4), [4], None, None, 1e-5), {0: (1, 4)}),
        (aten.slice.Tensor, (rows(8, 4), 0, 1, 5), {0: (4, 1)}),
        (aten.add.Tensor, (rows(4, 4), rows(4, 4)), {0: (4, 1), 1: (1, 4)}),
        (aten.mm.default, (rows(4, 4), rows(4, 4)), {0: (4, 1), 1: (1, 4)}),
        (aten.mm.default, (rows(4, 4), rows(4, 4)), {0: (2, 2)}),
        (aten.addmm.default, (rows(4), rows(3, 8), rows(8, 4)), {1: (1, 4)}),
        (aten.view.default, (rows(2, 4, 3), [8, 3]), {0: (1, 4, 1)}),
        (aten.view.default, (rows(8, 0, 3), [0, 8]), {0: (4, 1, 1)}),
        (aten.transpose.int, (rows(4, 4), 0, 1), {0: (2, 2)}),  # pieces in another order
        (aten.permute.default, (rows(4, 3, 4), [2, 1, -3]), {0: (2, 1, 2)}),
        (aten.mean.dim, (rows(8, 4), [0]), {0: (4, 1)}),
        (aten.cumsum.default, (rows(8, 4), 1), {0: (4, 1)}),  # has no rule yet
        (aten.scatter_add.default, (rows(8, 4), 1, places(8), rows(8, 1)), {0: (1, 4)}),
        (aten.scatter_add.default, (rows(8, 4), 1, places(1), rows(8, 1)), {0: (4, 1)}),
        (aten.mean.default, (torch.ones(8, 4, dtype=torch.bfloat16),), {0: (4, 1)}),
        (aten.sum.default, (torch.ones(8, 4, dtype=torch.int64),), {0: (4, 1)}),
    ],
)
def test_what_pieces_cannot_make_is_refused(
    target: Any, args: tuple[Any, ...], cuts: dict[int, tuple[int, ...]]
) -> None:
    """Rows that depend on each other, pieces that do not belong together, sums of short types."""
    with pytest.raises(NotByPiecesError):
        laid_out(target, args, cuts)


@pytest.mark.parametrize("rows", [(8,), (31,), (2, 8), (3, 31), (7, 9), (8, 1, 3), (5, 1, 7)])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
def test_pieces_are_runs_of_rows_however_they_are_seen(rows: tuple[int, ...], count: int) -> None:
    """Nothing twice, nothing left out, about as many as asked, and the same in another shape."""
    found = spread_from(rows, count)
    if found is None:
        assert math.prod(rows) < count
        return
    cuts, runs = (*found[0], 1), found[1]
    assert count / 2 < math.prod(cuts) < 2 * count
    whole = torch.arange(math.prod(rows) * 3).view(*rows, 3)
    flat = whole.view(-1, 3)
    pieces = [piece_of(whole, cuts, i, runs) for i in range(math.prod(cuts))]
    assert torch.equal(torch.cat([piece.reshape(-1, 3) for piece in pieces]), flat)
    there = reshaped(whole.shape, cuts, flat.shape, runs)
    assert there is not None
    back = reshaped(flat.shape, there, whole.shape, runs)
    assert back is not None
    for index, piece in enumerate(pieces):
        seen = piece_of(flat, there, index, runs)
        assert seen.shape == piece_shape(flat.shape, there, runs, index)
        assert torch.equal(seen, piece.reshape(-1, 3))
        assert torch.equal(piece_of(whole, back, index, runs), piece)


@pytest.mark.parametrize(
    ("shape", "cuts", "new"), [((8, 6), (4, 1), (8, 2, 3)), ((6, 8), (1, 4), (2, 3, 8, 1))]
)
def test_what_is_not_cut_may_be_reshaped(
    shape: tuple[int, ...], cuts: tuple[int, ...], new: tuple[int, ...]
) -> None:
    """Pieces are the same rows then."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    there = reshaped(shape, cuts, new)
    assert there is not None
    for index in range(4):
        piece = piece_of(whole, cuts, index).reshape(piece_shape(new, there))
        assert torch.equal(piece, piece_of(whole.view(new), there, index))


def test_the_next_number_that_divides_the_rows_is_taken() -> None:
    """From so many to less than twice as many; where there is none, the last piece is shorter."""
    assert spread_from((7, 511), 4) == ((7, 1), EVEN)
    assert spread_from((2, 511), 8) == ((2, 7), EVEN)
    assert spread_from((1, 31), 16) == ((1, 31), EVEN)
    assert spread_from((5, 31), 8) == ((5, 2), Runs(31, 2))
    assert spread_from((2, 3), 8) is None
    assert spread_from((2, 0), 2) is None


@pytest.mark.parametrize("reduction", [1, 2])
def test_an_exact_loss_keeps_a_number_for_each_row(reduction: int) -> None:
    """It is added up as the whole is, and no row of classes has to be there as a whole."""
    torch.manual_seed(0)
    values, named = torch.randn(1000, 7).log_softmax(1), torch.randint(7, (1000,))
    named[::3] = 2  # is ignored, though it is a class
    args = (values, named, None, reduction, 2)
    _, call, given, expected = laid_out(
        aten.nll_loss_forward.default, args, {0: (4, 1)}, same_bits=lambda *_: True
    )
    (gathered,) = call.pieces.gathered.values()
    assert gathered == (4,)
    found = call(*(given[taken] for taken in call.pieces.takes))
    assert all(map(torch.equal, found, expected))
