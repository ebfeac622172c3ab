"""What this package takes of torch beyond its documented surface.

Gets nothing from the rest of the package; gives torch's private functions under names of ours, the
flags by which kernels are chosen, functions of torch replaced for a while, and FLOP formulas that
torch has none for. When torch changes, read torch_private.py, which alone imports private modules
(so it is one file, though a long one); then kernel_choice.py.
"""
