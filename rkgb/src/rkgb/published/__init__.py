"""The names of the published examples: one module a kind of graph, and pictures of each.

Gets functions from all folders below, and gives them to `rkgb/__init__.py` under the names that the
examples use. Nothing is computed here but K of a list of blocks (Atools). Btools, Dtools, Stools,
Ktools, Atools follow the flow; check.py is `test_rkgb`.
"""
