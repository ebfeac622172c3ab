"""The names of the published examples: one module for each kind of graph, with its pictures.

Gets functions from all folders below; gives them to `rkgb/__init__.py` under the names of the
examples. Only Atools computes something, K of a list of blocks. Read Btools, Dtools, Stools,
Ktools, Atools in this order; check.py is `test_rkgb`.
"""
