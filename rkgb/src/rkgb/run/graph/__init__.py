"""Which graph is run: fewer views, gradients in memory that is free, and what a call lets go.

Gets a simplified graph; gives the graph that is run, and the storages that its nodes make. Read
views.py first, then overwrite.py (in-place reuse, donation) and node_storages.py.
"""
