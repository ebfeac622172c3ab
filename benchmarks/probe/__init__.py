"""The first ten minutes on a GPU: what holds there, section by section, within fixed times.

`run.py` starts one process a section, ends it at its limit, and keeps every row that it wrote
before. `sections.py` lists them in order; each is a function of `Machine` that yields rows.
`machine.py` knows networks, steps and meters; `table.py` prints what was found.
"""
