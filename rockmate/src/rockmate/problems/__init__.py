"""What planners know of a network: nodes, storages, times and sizes, but no tensors.

Gets facts about nodes from the runtime; gives a frozen `Problem`, and its blocks as separate
problems. Read problem.py, then blocks.py: cuts, blocks, and classes of equal ones.
"""
