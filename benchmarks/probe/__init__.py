"""The first look at a GPU: what holds there, section by section, within fixed times.

`wheels.py` finds packages that are not installed. `run.py` starts a process for each section, ends
it at its limit, and keeps the rows that it wrote. `sections.py` lists them in order, in two calls;
each is a function of `Machine` that yields rows. `machine.py` knows networks, steps and meters;
`table.py` prints what was found.
"""
