"""Run planned steps under autograd.

Gets a compiled step program of rkgb; gives the result of `Rockmate.forward`. Read execute.py (a
forward), steps/running_step.py (its backward) with executable.py, outputs.py and backwards.py (the
programs), gradients/rails.py (how gradients reach autograd), hung_step.py, joint_step.py and
split_step.py of steps/ (several outputs, some of which others use), gradients/shared_uses.py,
casts.py and shared_casts.py (gradients of leaves with several uses), and plain.py (running planned
modules without their plans).
"""
