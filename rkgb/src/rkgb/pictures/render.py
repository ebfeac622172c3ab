"""Draw graphs with Graphviz: every kind of graph through `print_graph`.

The `graphviz` package describes the picture in the DOT language; it is imported only here and only
when something is drawn. The program `dot` draws it. Without that program the description is
written, and a message says how to get the program.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

from rkgb.atlas.forward_backward import KGraph
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import DataFlowGraph, draw_by
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.pictures.dot import draw
from rkgb.pictures.sketch import Sketch, sketch_dataflow, sketch_k, sketch_list, sketch_simplified

FORMATS = ("svg", "pdf", "png")
_PNG_DOTS_PER_INCH = "110"
INSTALL = (
    "apt-get install graphviz (Debian, Ubuntu), brew install graphviz (macOS) or "
    "conda install -c conda-forge graphviz"
)


def print_graph(
    g: Any,
    name: str | None = None,
    open: bool = False,  # the published name of the option
    render_format: str = "svg",
    folder: str | Path = ".",
    title: str | None = None,
    *,
    folded: bool = True,
    columns: int | None = None,
) -> Path | None:
    """Draw a D, S or K graph, a list of blocks or an `RkgbResult` into a file; return its path.

    A B graph is a list and is printed as text. `open` shows the picture. `name` is the file name
    without its ending; `title`, if given, is written above the legend in its place. `folded=False`
    draws repeated layers out. A picture that is too tall for a page continues in a second column,
    which is read upwards, and so on; `columns` fixes their number.

    Raises:
        ValueError: `render_format` is none of svg, pdf, png; `columns` is less than 1.
    """
    if isinstance(g, BasicGraph):
        print(g)
        return None
    if render_format not in FORMATS:
        raise ValueError(
            f"render_format {render_format!r} was asked for; choose one of {', '.join(FORMATS)}."
        )
    sketch = sketch_of(g, title or name)
    name = name or _file_name(g)
    drawing = draw(sketch, folded=folded, columns=columns)
    try:
        return _write(drawing, name, open, render_format, Path(folder))
    except subprocess.CalledProcessError:
        # Some versions of dot abort on arrows between boxes; a single column has none.
        drawing = draw(sketch, folded=folded, columns=1)
        return _write(drawing, name, open, render_format, Path(folder))


# Of a list of blocks it draws their chain, and each class once in detail.
print_graph_list = print_graph


def print_all_graphs(
    result: Any,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
    folder: str | Path = ".",
    *,
    folded: bool = True,
    columns: int | None = None,
) -> list[Path]:
    """Draw D, S, K and the blocks of `result`, each into a file of its own; return their paths."""
    title = name or result.B_graph.model_name
    graphs = {
        "D_graph": result.D_graph,
        "S_graph": result.S_graph,
        "K_graph": result.K_graph,
        "blocks": list(result.S_graph_list),
    }
    how: dict[str, Any] = {"open": open, "render_format": render_format, "folder": folder}
    how |= {"title": title, "folded": folded, "columns": columns}
    paths = [print_graph(graph, f"{title}_{kind}", **how) for kind, graph in graphs.items()]
    return [path for path in paths if path is not None]


def dot_source(
    g: Any, name: str | None = None, *, folded: bool = True, columns: int | None = None
) -> str:
    """Return the picture of `g` in the DOT language; the program `dot` is not needed."""
    return str(draw(sketch_of(g, name), folded=folded, columns=columns).source)


def inline_svg(g: Any, name: str | None = None) -> str | None:
    """Return the picture of `g` as a part of a page of HTML; None where Graphviz is missing."""
    if shutil.which("dot") is None:
        return None
    drawn = draw(sketch_of(g, name), folded=True, columns=1).pipe(format="svg", encoding="utf-8")
    return str(drawn[drawn.index("<svg") :])


draw_by(inline_svg)


def sketch_of(g: Any, name: str | None = None) -> Sketch:
    """Return what a picture of `g` shows.

    Raises:
        TypeError: `g` cannot be drawn.
    """
    if isinstance(g, DataFlowGraph):
        return sketch_dataflow(g)
    if isinstance(g, SimplifiedGraph):
        return sketch_simplified(g)
    if isinstance(g, KGraph):
        return sketch_k(g, name or "")
    if hasattr(g, "S_graph_list"):
        return sketch_list(g.S_graph_list, f"{name or g.B_graph.model_name}: blocks")
    if (
        isinstance(g, (list, tuple))
        and g
        and all(isinstance(x, (SimplifiedGraph, KGraph)) for x in g)
    ):
        return sketch_list(g, f"{name}: blocks" if name else "blocks")
    raise TypeError(
        f"cannot draw a {type(g).__name__}: give a D, S or K graph, a list of S or K graphs, or "
        "what make_all_graphs returned."
    )


def _file_name(g: Any) -> str:
    if isinstance(g, DataFlowGraph):
        return f"{g.basic.model_name}_D_graph"
    if isinstance(g, SimplifiedGraph):
        return f"{g.basic.model_name}_S_graph"
    if isinstance(g, KGraph):
        return "K_graph"
    return f"{g.B_graph.model_name}_blocks" if hasattr(g, "B_graph") else "blocks"


@functools.cache
def print_once(text: str) -> None:
    """Print a message once per process."""
    print(text)


def _write(drawing: Any, name: str, show: bool, render_format: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if render_format == "png":
        # Only for pixels. In an SVG, Graphviz enlarges the drawing by dpi / 72 but not its viewBox,
        # so a viewer would cut it off.
        drawing.attr(dpi=_PNG_DOTS_PER_INCH)
    source = folder / f"{name}.gv"
    if shutil.which("dot") is None:
        source.write_text(drawing.source, encoding="utf-8")
        print(f"wrote {source}")
        print_once(
            "Pictures need the program 'dot' of Graphviz, which was not found. Install it: "
            f"{INSTALL}; then: dot -T{render_format} -O FILE"
        )
        return source
    picture = folder / f"{name}.{render_format}"
    drawing.render(outfile=str(picture), filename=str(source), cleanup=True, view=show)
    print(f"wrote {picture}")
    return picture
