"""Run planned steps under autograd.

Gets a compiled step program of rkgb and gives what `Rockmate.forward` returns. Read execute.py (a
forward), running_step.py (its backward) with executable.py and backwards.py (what runs), rails.py
(how gradients reach autograd), hung_step.py, joint_step.py and split_step.py (several outputs, some
computed from others), shared_uses.py (gradients of what a step uses several times), and plain.py
(planned modules run as plain ones).
"""
