"""What inductor makes of a piece: for its size or for many, once for all pieces that are equal.

Gets what pieces compute; gives functions for their forwards and backwards, and what these keep for
one another. Read halves.py (forward and backward apart), compiling.py (how inductor is called),
classes.py (what it made), sizes.py (code for all sizes), known.py (what is compiled already),
flops.py (what graphs compute) and keeping.py (the other partition of a piece).
"""
