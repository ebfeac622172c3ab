"""Run planned steps under autograd.

Gets a compiled step program of rkgb; gives the result of `Rockmate.forward`. Read execute.py (a
forward), running_step.py (its backward) with executable.py and backwards.py (the programs),
rails.py (how gradients reach autograd), hung_step.py, joint_step.py and split_step.py (several
outputs, some of which others use), shared_uses.py (gradients of leaves with several uses), and
plain.py (running planned modules without their plans).
"""
