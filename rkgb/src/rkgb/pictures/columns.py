"""Break a long row of cells into columns, so that a picture of it is about as wide as a page.

Columns are read like a snake: down the first, up the second, and so on. Neighbours stay near, and
skip connections (from the encoder of a U-Net to its decoder) run across. Sizes are estimates in
inches from the text in the cells: the picture itself is made elsewhere, later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rkgb.elements.module_paths import common
from rkgb.pictures.fold import Folding
from rkgb.pictures.sketch import Cell, Sketch, Vertex

PAGE = (7.0, 9.5)  # inches of a printed page for one picture
_MOST = 8  # columns
_PLACES = 150  # considered for a break
_UNEVEN = 1.15  # a column may be higher by this factor for a break at a better place
_FIRST, _NEXT = 0.2, 0.1  # enlargement that a second and each further column must bring
_SPREAD = 1.12  # boxes of all columns push the same levels apart
_FAR = 0.4  # enlargement that one arrow across a column is worth
_GAP = 0.8  # between columns


@dataclass(frozen=True, slots=True)
class SizedCell:
    """One drawn cell: its estimated size, and the cells from which it must not be separated."""

    cell: int
    width: float
    height: float
    path: tuple[str, ...] = ()  # its module and the enclosing ones, outermost first
    repeat: int | None = None  # the outermost repeat it is in


@dataclass(frozen=True, slots=True)
class Columns:
    """The cells of each column, in program order, and the estimated total size."""

    cells: tuple[tuple[int, ...], ...]
    width: float
    height: float
    far: int = 0  # columns that arrows cross, counted once per value

    def larger_by(self) -> float:
        """Return how many times larger than the page the picture is; far arrows add to it."""
        return max(self.width / PAGE[0], self.height / PAGE[1]) * (1 + _FAR * self.far)


def arrange(
    pieces: Sequence[SizedCell], arrows: Sequence[tuple[int, int]], count: int | None = None
) -> Columns:
    """Return the columns that show the picture largest on a page, or `count` columns.

    `arrows` are pairs of cells. A repeat is never broken, so there may be fewer than `count`.

    Raises:
        ValueError: `count` is less than 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"{count} columns were asked for; choose 1 or more, or None.")
    if not pieces:
        return Columns((), 0.0, 0.0)
    table = _Sizes(pieces, arrows)
    if count is not None:
        return table.split(count)
    best = table.split(1)
    for number in range(2, min(_MOST, len(pieces)) + 1):
        other = table.split(number)
        worth = _FIRST if len(best.cells) == 1 else _NEXT
        if other.larger_by() < best.larger_by() * (1 - worth):
            best = other
    return best


class _Sizes:
    """The size of every run of cells as a column, and the cost of a break between two cells."""

    def __init__(self, pieces: Sequence[SizedCell], arrows: Sequence[tuple[int, int]]) -> None:
        self.pieces = pieces
        place = {piece.cell: index for index, piece in enumerate(pieces)}
        inside = {(place[a], place[b]) for a, b in arrows if a in place and b in place}
        self.before: list[list[int]] = [[] for _ in pieces]
        for source, target in sorted(inside):
            if source < target:
                self.before[target].append(source)
        self.breaks = [0] + [
            index
            for index in range(1, len(pieces))
            if pieces[index].repeat is None or pieces[index].repeat != pieces[index - 1].repeat
        ]
        self.last_reader: dict[int, int] = {}
        for source, target in inside:
            self.last_reader[source] = max(target, self.last_reader.get(source, 0))
        self.cost = {
            index: sum(a < index <= b for a, b in inside)
            + 2 * len(common([pieces[index - 1].path, pieces[index].path]))
            for index in self.breaks[1:]
        }
        # The work grows with the square of their number, so only the best are kept.
        self.breaks = [0, *sorted(sorted(self.breaks[1:], key=self.cost.__getitem__)[:_PLACES])]
        self.sizes = {
            (start, end): size for start in self.breaks for end, size in self._runs(start)
        }

    def _runs(self, start: int) -> list[tuple[int, tuple[float, float]]]:
        """Return the (width, height) of the columns that begin at `start`, by their end."""
        ends = {*self.breaks, len(self.pieces)}
        found: list[tuple[int, tuple[float, float]]] = []
        bottom: dict[int, float] = {}  # of each cell if it stands below all that it reads
        level: dict[int, int] = {}
        widths: list[float] = []
        height = width = 0.0
        for index in range(start, len(self.pieces)):
            piece = self.pieces[index]
            above = [source for source in self.before[index] if source >= start]
            before = self.pieces[index - 1].path if index > start else ()
            shared = len(common([before, piece.path]))
            frame = 0.3 * min(max(len(piece.path) - 1 - shared, 0), 2)
            bottom[index] = max((bottom[i] for i in above), default=0.0) + piece.height + frame
            # A cell that reads nothing here is drawn near its readers, beside its predecessor.
            beside = level[index - 1] if index > start else 0
            level[index] = max((level[i] + 1 for i in above), default=beside)
            height = max(height, bottom[index])
            while len(widths) <= level[index]:
                widths.append(0.0)
            widths[level[index]] += piece.width + 0.25
            width = max(width, widths[level[index]])
            if index + 1 in ends:
                found.append((index + 1, (width, height)))
        return found

    def split(self, count: int) -> Columns:
        """Return at most `count` columns of about equal height, broken where few arrows pass."""
        bounds = [*self.breaks, len(self.pieces)]
        # lowest[k][end]: the height of the highest of k columns that hold the cells before `end`.
        lowest: list[dict[int, float]] = [{0: 0.0}]
        for _ in range(count):
            row = {}
            for end in bounds[1:]:
                row[end] = min(
                    (
                        max(high, self.sizes[start, end][1])
                        for start, high in lowest[-1].items()
                        if start < end
                    ),
                    default=float("inf"),
                )
            lowest.append(row)
        last = len(self.pieces)
        used = min(range(1, count + 1), key=lambda k: (round(lowest[k][last], 6), k))
        return self._cheapest(used, lowest[used][last] * _UNEVEN)

    def _cheapest(self, count: int, limit: float) -> Columns:
        bounds = [*self.breaks, len(self.pieces)]
        last = len(self.pieces)
        # Fewest arrows through the breaks, then the most even columns.
        best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, (0,))}]
        for _ in range(count):
            row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            for end in bounds[1:]:
                for start, (cost, uneven, ways) in best[-1].items():
                    if start >= end or self.sizes[start, end][1] > limit:
                        continue
                    height = self.sizes[start, end][1]
                    paid = cost + (self.cost[end] if end != last else 0.0)
                    way = (paid, uneven + height**2, (*ways, end))
                    row[end] = min(row.get(end, way), way)
            best.append(row)
        ways = best[count][last][2]
        runs = list(pairwise(ways))
        cells = tuple(tuple(p.cell for p in self.pieces[a:b]) for a, b in runs)
        width = sum(self.sizes[run][0] for run in runs) + _GAP * (len(runs) - 1)
        height = max(self.sizes[run][1] for run in runs)
        far = sum(
            sum(source < a and b <= target for a, b in runs)
            for source, target in self.last_reader.items()
        )
        return Columns(cells, width, height * (_SPREAD if len(runs) > 1 else 1.0), far)


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
            next((number for number, _ in folding.places[c].copies), None),
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
