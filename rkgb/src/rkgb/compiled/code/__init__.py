"""Compiles pieces with inductor, for one size or for many, once for all equal pieces.

Gets what pieces compute; gives functions for their forwards and backwards, with the saved tensors
between them. Read halves.py (forward and backward apart, and their FLOPs), compiling.py (how
inductor is called), classes.py (its results), sizes.py (code for all sizes) and known.py (the cache
of this process).
"""
