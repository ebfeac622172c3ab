"""What a piece is: its nodes, its computation, and the layout of values between pieces.

Gets a simplified graph; gives runs of its nodes, and each run's operations as one function. Read
grouping.py (the runs), layouts.py (strides between them), joint.py (forward and backward as one
function), then formulas.py (how some operations are computed).
"""
