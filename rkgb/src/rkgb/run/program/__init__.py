"""Statements of a step, their order and drops, and the source that they become.

Gets a graph and the steps of a plan; gives Python source, compiled. Read lowering.py first, then
statements.py, places.py (where gradients are handed over), state.py and source.py.
"""
