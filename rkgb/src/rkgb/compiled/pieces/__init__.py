"""What a piece is: which nodes it joins, what it computes, and how values lie between pieces.

Gets a simplified graph; gives runs of its nodes, and each run's operations as one function. Read
grouping.py (where runs are cut), layouts.py (strides between them), joint.py (forward and backward
as one function), then formulas.py (how some operations are computed).
"""
