"""Pictures of every kind of graph.

Gets a graph; gives an svg, pdf or png, or its description in the DOT language. Read render.py (the
entry), sketch.py (what is shown), fold.py (equal layers once), columns.py (the place on
the page), then dot.py and legend.py (how it looks).
"""
