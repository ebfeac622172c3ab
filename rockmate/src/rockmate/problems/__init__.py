"""What planners know of a network: nodes, storages, times and sizes, and nothing of tensors.

Gets facts about nodes from the runtime; gives a frozen `Problem`, and its blocks as problems of
their own. Read problem.py, then blocks.py: cuts, blocks, and classes of equal ones.
"""
