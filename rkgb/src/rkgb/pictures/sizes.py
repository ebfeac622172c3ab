"""The approximate size of the cells of a picture, and the columns that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

from rkgb.pictures.columns import PAGE, SizedCell, arrange
from rkgb.pictures.fold import Folding
from rkgb.pictures.sketch import Cell, Sketch, Vertex

_BOLD, _SMALL = 0.095, 0.068  # inches of a letter of 11 and of 9 points
_ROW, _BETWEEN = 0.17, 0.36  # a line of text; the space between two levels
_BADGE = 1.7  # the count of a repeat, if it stands beside the cells


def columns_of(
    sketch: Sketch, folding: Folding, count: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, float]]:
    """Return the drawn cells by column, in the order of reading, and the total size."""
    cells = sketch.cells
    inputs = [c for c in folding.shown if cells[c].vertices["fwd"].kind == "input"]
    pieces = [
        SizedCell(
            c,
            *_extent(cells[c], bool(folding.places[c].copies)),
            tuple(cells[c].path.split(".")),
            _outer(folding, c),
        )
        for c in folding.shown
        if c not in inputs
    ]
    ends = (folding.edge(arrow.source[0], arrow.target[0]) for arrow in sketch.arrows)
    arrows = list(dict.fromkeys(pair for pair in ends if pair is not None))
    found = arrange(pieces, arrows, count)
    columns = [list(column) for column in found.cells] or [[]]
    column_of = {cell: column for column in columns for cell in column}
    for cell in reversed(inputs):  # beside its first reader
        readers = [target for source, target in arrows if source == cell and target in column_of]
        column_of.get(min(readers, default=-1), columns[0]).insert(0, cell)
    return tuple(map(tuple, columns)), (found.width, found.height)


def grid(sizes: Sequence[tuple[float, float]]) -> tuple[list[int], int]:
    """Return the order of pictures in a grid, row by row, and the number in a row.

    The first picture stays first. Low ones come last, so that the rows are about even.
    """
    rest = range(1, len(sizes))
    middle = max((sizes[i][1] for i in rest), default=0.0) / 2
    order = [0, *sorted(rest, key=lambda i: (sizes[i][1] < middle, i))]

    def larger(across: int) -> float:
        rows = [order[i : i + across] for i in range(0, len(order), across)]
        height = sum(max(sizes[i][1] + 1 for i in row) for row in rows)
        width = sum(max(sizes[i][0] + 1 for i in order[c::across]) for c in range(across))
        return max(width / PAGE[0], height / PAGE[1])

    return order, min(range(1, len(sizes) + 1), key=larger)


def _outer(folding: Folding, cell: int) -> int | None:
    copies = folding.places[cell].copies
    return copies[0][0] if copies else None


def _extent(cell: Cell, repeated: bool) -> tuple[float, float]:
    """Return the width and height of one cell with the space below it."""
    level = [v for role, v in cell.vertices.items() if role in ("fwd", "phantom 0", "bwd")]
    below = [v for role, v in cell.vertices.items() if role not in ("fwd", "phantom 0", "bwd")]
    width = sum(_width(v, cell.path) + 0.3 for v in level) - 0.3
    height = max(map(_height, level)) + _BETWEEN
    if below:
        height += max(map(_height, below)) + _BETWEEN
        width = max(width, sum(_width(v, "") + 0.2 for v in below))
    return width + (_BADGE if repeated and not cell.path else 0.0), height


def _width(vertex: Vertex, path: str) -> float:
    own = path.rpartition(".")[2] if vertex.kind == "fwd" else ""
    title = len(vertex.title) + (len(own) + 2 if own else 0)
    details: Sequence[str] = vertex.detail.split("\n")
    return 0.25 + max(_BOLD * title, *(_SMALL * len(line) for line in details))


def _height(vertex: Vertex) -> float:
    rows = bool(vertex.title) + sum(bool(line) for line in vertex.detail.split("\n"))
    return 0.14 + _ROW * rows
