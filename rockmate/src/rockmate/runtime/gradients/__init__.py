"""How gradients reach autograd: rails that hand them over, and sums for leaves that many use.

Gets the gradients that a step makes; hands them to autograd in the order of plain PyTorch. Read
rails.py first, then shared_uses.py; casts.py and shared_casts.py are for weights that autocast
casts.
"""
